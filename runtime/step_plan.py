"""What a step needs of its ScheduledBatch, as host arrays: which tokens go in, which rows of logits come out.

`plan_step` makes batches as they are. `plan_fixed_rows` makes every step alike, for the deterministic mode: each new
token is a row of its own, a decode of one token, and padding fills the rest. So whatever computes a token has the same
shapes in every step, and a token's numbers depend on its own request alone, however its prompt was cut.

Shape legend: R requests of a step, T tokens, S sampled rows, N prompt positions whose log-probabilities are wanted.
Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.scheduled_batch import ScheduledBatch

_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPlan:
    """Arrays of a step.

    Attributes:
        fields: to be uploaded together. Of tokens: `positions`, `table_entries` (index into the flattened table of
            slots where each one's KV goes) and `prefill_ids` (ids of the tokens after the decodes; none in a pure
            decode). Of rows that attention sees: `rows`, `seq_lens`, and in EXTEND `num_new`, `prefix_lens`. Of logits:
            `logits_indices` (EXTEND), and where they are not `rows` and `seq_lens` `sampled_slots` and
            `sampled_positions`; `prompt_targets`. Of page writes: `page_rows`, `page_positions`, `page_ids`.
        seq_lens: [rows of attention] int32, on the host.
        is_decode: every row of attention is one token.
        sampled: [S] index of the requests whose next token is sampled.
        sampled_logits, prompt_logits: the rows of logits that are sampled, and scored against prompt_targets.
        token_indices: [S] where the tokens of `sampled` are among the sampled rows.
        score_indices: [N] where the scores of the prompt positions are among the scored rows.
        prompt_rows: [N] request of each prompt position that is scored.
        prompt_num_top: alternatives that are wanted there.
    """

    fields: dict[str, np.ndarray]
    seq_lens: np.ndarray
    is_decode: bool
    sampled: np.ndarray
    sampled_logits: slice
    token_indices: np.ndarray
    prompt_logits: slice
    score_indices: np.ndarray
    prompt_rows: np.ndarray
    prompt_num_top: int


def plan_step(batch: ScheduledBatch, table_width: int) -> StepPlan:
    """The batch as it is: a decode, or prompt chunks behind decodes.

    Args:
        table_width: columns of the table of slots.
    """
    rows = batch.rows.astype(np.int64)
    seq_lens = batch.seq_lens
    fields = {"rows": rows, "seq_lens": seq_lens} | _page_writes(batch)
    if batch.num_decodes == batch.num_requests:
        fields["positions"] = seq_lens.astype(np.int64) - 1
        fields["table_entries"] = rows * table_width + fields["positions"]
        return _finish(batch, fields, sampled=np.arange(batch.num_requests), is_decode=True)

    ends = np.cumsum(batch.num_new, dtype=np.int64)
    starts = ends - batch.num_new
    fields |= _tokens(batch, starts, table_width)
    fields["num_new"] = batch.num_new
    fields["prefix_lens"] = batch.prefix_lens
    sampled = np.flatnonzero(batch.sample_mask)
    if len(sampled) < batch.num_requests:
        fields["sampled_slots"] = rows[sampled]
        fields["sampled_positions"] = seq_lens[sampled]
    prompt_rows, prompt_indices, targets = _prompt_positions(batch, starts)
    indices = np.concatenate((ends[sampled] - 1, prompt_indices))
    # The head takes at least one row; with nothing to sample its logits are not looked at.
    fields["logits_indices"] = indices if indices.size else ends[:1] - 1
    if targets.size:
        fields["prompt_targets"] = targets
    return _finish(batch, fields, sampled=sampled, is_decode=False, prompt_rows=prompt_rows)


def plan_fixed_rows(batch: ScheduledBatch, table_width: int, num_rows: int) -> StepPlan:
    """A decode of `num_rows` rows, one a token; a row of padding is the dummy row's only token.

    All rows are sampled, and scored when a prompt position is: what is not asked for is left behind on the device.

    Args:
        table_width: columns of the table of slots.
        num_rows: at least batch.num_tokens; the same in every step.
    """
    ends = np.cumsum(batch.num_new, dtype=np.int64)
    starts = ends - batch.num_new
    tokens = _tokens(batch, starts, table_width)
    sampled = np.flatnonzero(batch.sample_mask)
    last_rows = ends[sampled] - 1
    prompt_rows, prompt_indices, prompt_targets = _prompt_positions(batch, starts)
    slots, targets = np.zeros((2, num_rows), dtype=np.int64)  # slot 0 belongs to nobody
    slots[last_rows] = batch.rows[sampled]
    targets[prompt_indices] = prompt_targets

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, num_rows - batch.num_tokens))

    fields = _page_writes(batch) | {
        "rows": padded(np.repeat(batch.rows.astype(np.int64), batch.num_new)),
        "seq_lens": padded(tokens["positions"]).astype(np.int32) + 1,
        "positions": padded(tokens["positions"]),
        "table_entries": padded(tokens["table_entries"]),
        "prefill_ids": padded(tokens["prefill_ids"]),
        "sampled_slots": slots,
    }
    if prompt_rows.size:
        fields["prompt_targets"] = targets
    return StepPlan(
        fields=fields,
        seq_lens=fields["seq_lens"],
        is_decode=True,
        sampled=sampled,
        sampled_logits=slice(None),
        token_indices=last_rows,
        prompt_logits=slice(None),
        score_indices=prompt_indices,
        prompt_rows=prompt_rows,
        prompt_num_top=_num_top(batch, prompt_rows),
    )


def _finish(
    batch: ScheduledBatch,
    fields: dict[str, np.ndarray],
    *,
    sampled: np.ndarray,
    is_decode: bool,
    prompt_rows: np.ndarray = _NONE,
) -> StepPlan:
    """Sampled rows come first in the logits, prompt positions behind them."""
    return StepPlan(
        fields=fields,
        seq_lens=fields["seq_lens"],
        is_decode=is_decode,
        sampled=sampled,
        sampled_logits=slice(len(sampled)),
        token_indices=np.arange(len(sampled)),
        prompt_logits=slice(len(sampled), None),
        score_indices=np.arange(len(prompt_rows)),
        prompt_rows=prompt_rows,
        prompt_num_top=_num_top(batch, prompt_rows),
    )


def _page_writes(batch: ScheduledBatch) -> dict[str, np.ndarray]:
    if not batch.page_ids.size:
        return {}
    return {
        "page_rows": batch.page_rows.astype(np.int64),
        "page_positions": batch.page_positions.astype(np.int64),
        "page_ids": batch.page_ids,
    }


def _tokens(batch: ScheduledBatch, starts: np.ndarray, table_width: int) -> dict[str, np.ndarray]:
    """`positions`, `table_entries` [T] and `prefill_ids` [T - num_decodes]; starts: [R] each request's first token."""
    positions = np.arange(batch.num_tokens) + np.repeat(batch.prefix_lens - starts, batch.num_new)
    first_entries = np.repeat(batch.rows.astype(np.int64) * table_width, batch.num_new)
    return {
        "positions": positions,
        "table_entries": first_entries + positions,
        "prefill_ids": batch.prefill_token_ids,
    }


def _prompt_positions(batch: ScheduledBatch, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, index into T, next prompt token) of each new token that predicts a prompt token, where that is wanted.

    A loop over requests, of which few ask for it and each but while its prompt is computed.
    """
    parts = [(_NONE, _NONE, _NONE)]
    for row in np.flatnonzero(batch.prompt_logprob_rows).tolist():
        prompt, prefix = batch.requests[row].prompt_token_ids, int(batch.prefix_lens[row])
        targets = np.asarray(prompt[prefix + 1 : prefix + 1 + int(batch.num_new[row])], dtype=np.int64)
        parts.append((np.full(targets.size, row), starts[row] + np.arange(targets.size), targets))
    rows, indices, targets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return rows, indices, targets


def _num_top(batch: ScheduledBatch, prompt_rows: np.ndarray) -> int:
    if not prompt_rows.size:
        return 0
    return max(batch.requests[row].params.prompt_logprobs or 0 for row in np.unique(prompt_rows))
