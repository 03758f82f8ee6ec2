"""Turns a ScheduledBatch into a step's host arrays: which tokens go in, which rows of logits come out.

`plan_step` makes batches as they are. In the deterministic mode each new token is a row of its own, a decode of one
token. So a token's numbers depend on its own request alone, however its prompt was cut. Where products depend on the
number of rows, `plan_fixed_rows` makes every step alike: padding fills the rest. Else `plan_rows` makes as many as
there are tokens.

Shape legend: R requests of a step, T tokens, S sampled rows, N prompt positions whose log-probabilities are wanted.
Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mllm_compile.runtime.config_sections import LEAST_ROWS
from mllm_compile.runtime.graph_mode import DPMetadata
from mllm_compile.runtime.media.step_plan import MediaPlan
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.host_page_table import HostPageTable
from mllm_compile.runtime.step_fields import StepFields

_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class RunPlan:
    """The sampled requests of a verify step; Q of them, with up to K drafted tokens.

    Attributes:
        requests: [Q] index of each in the batch.
        places: [Q, K + 1] where its tokens are among StepPlan.sampled; behind them its last one again.
        draft_ids: [Q, K]; NO_TOKEN behind a draft.
    """

    requests: np.ndarray
    places: np.ndarray
    draft_ids: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPlan:
    """Arrays of a step.

    Attributes:
        fields: the uploaded inputs, except new pages.
        is_decode: every row of attention is one token.
        sampled: [S] index of the requests whose next token is sampled; ascending, again for each token of a draft.
        token_indices: [S] where the tokens of `sampled` are among the sampled rows.
        score_indices: [N] where the scores of the prompt positions are among the scored rows.
        prompt_rows: [N] request of each prompt position that is scored.
        prompt_num_top: alternatives that are wanted there.
        media: positions and features, where requests have images; set by the caller that knows them.
        rank_batch: the part of the batch that this rank computes, where ranks have requests of their own; None: all of
            it.
        runs: the sampled requests of a verify step; None: each has one token.
        across: how many tokens each of these ranks has.
        scored: [N ranks * M] more tokens whose logits are wanted, a block a rank; every rank has to know them. None: no
            others are wanted, or fields.scored_indices has all.
    """

    fields: StepFields[np.ndarray]
    is_decode: bool
    sampled: np.ndarray
    token_indices: np.ndarray
    score_indices: np.ndarray
    prompt_rows: np.ndarray
    prompt_num_top: int
    media: MediaPlan | None = None
    runs: RunPlan | None = None
    rank_batch: ScheduledBatch | None = None
    across: DPMetadata | None = None
    scored: np.ndarray | None = None


class Planner:
    """Plans the steps of a rank that has all requests."""

    def __init__(self, pages: HostPageTable) -> None:
        """
        Args:
            pages: has the new pages of a batch before it is planned.
        """
        self._pages = pages

    def most_requests(self, batch: ScheduledBatch) -> int:
        """Requests of the rank that has most."""
        return batch.num_requests

    def plan(self, batch: ScheduledBatch) -> StepPlan:
        """Plans any step."""
        return plan_step(batch, self._pages)

    def plan_decodes(self, batch: ScheduledBatch) -> StepPlan:
        """Plans decodes that are captured."""
        return plan_step(batch, self._pages)

    def blocks(self, batch: ScheduledBatch, size: int) -> tuple[np.ndarray, int]:
        """Where requests are among the rows of a captured step with up to `size` of each rank, and how many rows there
        are."""
        return np.arange(batch.num_requests), batch.num_requests

    def token_positions(self, batch: ScheduledBatch, plan: StepPlan) -> np.ndarray:
        """[T] each token's place within its request."""
        return plan.fields.positions

    def with_media(self, plan: StepPlan, batch: ScheduledBatch, media: MediaPlan | None) -> StepPlan:
        """The plan with the positions and features of the step's images."""
        return with_media(plan, media)

    def with_scored(self, plan: StepPlan, scored: np.ndarray | None) -> StepPlan:
        """The plan with the tokens whose logits are asked for besides, as rank 0 has planned them."""
        plan.fields.scored_indices = scored
        return plan


class FixedRowsPlanner(Planner):
    """Plans the steps of the deterministic mode."""

    def __init__(self, pages: HostPageTable, num_rows: int) -> None:
        """
        Args:
            num_rows: as plan_fixed_rows takes it.
        """
        super().__init__(pages)
        self._num_rows = num_rows

    def plan(self, batch: ScheduledBatch) -> StepPlan:
        return plan_fixed_rows(batch, self._pages, self._num_rows)


class RowsPlanner(Planner):
    """Plans the steps of the deterministic mode where products do not depend on the number of rows."""

    def plan(self, batch: ScheduledBatch) -> StepPlan:
        return plan_rows(batch, self._pages)


def plan_step(batch: ScheduledBatch, pages: HostPageTable) -> StepPlan:
    """Plans the batch as it is: a decode, or prompt chunks behind decodes.

    Args:
        pages: the page table, the batch's own writes included.
    """
    seq_lens = batch.seq_lens
    if batch.num_decodes == batch.num_requests and not batch.has_drafts:
        positions = seq_lens - 1
        fields = StepFields(
            input_ids=np.zeros_like(positions),
            positions=positions,
            out_cache_loc=pages.slots(batch.rows, positions),
            req_pool_indices=batch.rows,
            seq_lens=seq_lens,
        )
        return _finish(batch, fields, sampled=np.arange(batch.num_requests), is_decode=True)

    ends = np.add.accumulate(batch.num_new, dtype=np.int64)
    starts = ends - batch.num_new
    fields = StepFields(**_tokens(batch, starts, pages), req_pool_indices=batch.rows, seq_lens=seq_lens)
    fields.num_new, fields.prefix_lens = batch.num_new, batch.prefix_lens
    return _plan_tokens(batch, fields, starts, ends, is_decode=False)


def plan_rows(batch: ScheduledBatch, pages: HostPageTable) -> StepPlan:
    """Plans a decode of one row a token; arguments as plan_step.

    Few rows are padded, as products with fewer than LEAST_ROWS take other kernels. The dummy row's only token pads
    rows, and the first row pads what is sampled and scored.
    """
    ends = np.add.accumulate(batch.num_new, dtype=np.int64)
    starts = ends - batch.num_new
    tokens = _tokens(batch, starts, pages)
    tokens["req_pool_indices"] = batch.rows.repeat(batch.num_new)
    padded = {name: _at_least(values, LEAST_ROWS) for name, values in tokens.items()}
    fields = StepFields(**padded, seq_lens=padded["positions"] + 1)
    plan = _plan_tokens(batch, fields, starts, ends, is_decode=True)
    for name in ("logits_indices", "sampled_rows", "sampled_positions"):
        setattr(fields, name, _at_least(getattr(fields, name), LEAST_ROWS))
    if fields.scored_indices is not None and fields.prompt_targets is not None:
        count = -(-fields.scored_indices.size // LEAST_ROWS) * LEAST_ROWS  # as parts of them are taken at a time
        fields.scored_indices = _at_least(fields.scored_indices, count)
        fields.prompt_targets = _at_least(fields.prompt_targets, count)
    return plan


def _at_least(values: np.ndarray, count: int) -> np.ndarray:
    """The values, with zeros behind them where they are fewer."""
    return np.pad(values, (0, max(0, count - values.size)))


def _plan_tokens(
    batch: ScheduledBatch, fields: StepFields[np.ndarray], starts: np.ndarray, ends: np.ndarray, is_decode: bool
) -> StepPlan:
    """Plans the rows that are sampled and scored, of a step that is no plain decode.

    Args:
        fields: the token inputs, and what attention sees.
        starts, ends: [R] each request's tokens.
    """
    sampled = batch.sample_mask.nonzero()[0]
    runs = None
    if batch.has_drafts:
        sampled, last_tokens, runs = plan_runs(batch, ends)
        fields.sampled_rows, fields.sampled_positions = batch.rows[sampled], fields.positions[last_tokens] + 1
        fields.logits_indices = last_tokens
        fields.run_indices, fields.draft_ids = runs.places.ravel(), runs.draft_ids.ravel()
    else:
        if is_decode or len(sampled) < batch.num_requests:
            fields.sampled_rows, fields.sampled_positions = batch.rows[sampled], batch.seq_lens[sampled]
        # The head takes at least one row; with nothing to sample its logits are not looked at.
        fields.logits_indices = (ends[sampled] if sampled.size else ends[:1]) - 1
    prompt_rows, prompt_indices, targets = prompt_positions(batch, starts)
    if targets.size:
        fields.scored_indices, fields.prompt_targets = prompt_indices, targets
    return _finish(batch, fields, sampled=sampled, is_decode=is_decode, prompt_rows=prompt_rows, runs=runs)


def plan_fixed_rows(batch: ScheduledBatch, pages: HostPageTable, num_rows: int) -> StepPlan:
    """Plans a decode of `num_rows` rows, one a token; a row of padding is the dummy row's only token.

    All rows are sampled, and scored if a prompt position is: unwanted results stay on the device.

    Args:
        pages: the page table, the batch's own writes included.
        num_rows: at least batch.num_tokens; the same in every step.
    """
    ends = np.cumsum(batch.num_new, dtype=np.int64)
    starts = ends - batch.num_new
    tokens = _tokens(batch, starts, pages)
    sampled = np.flatnonzero(batch.sample_mask)
    last_rows = ends[sampled] - 1
    runs = None
    if batch.has_drafts:
        sampled, last_rows, runs = plan_runs(batch, ends)
    prompt_rows, prompt_indices, prompt_targets = prompt_positions(batch, starts)
    sampled_rows, targets = np.zeros((2, num_rows), dtype=np.int64)  # row 0 belongs to no request
    sampled_rows[last_rows] = batch.rows[sampled]
    targets[prompt_indices] = prompt_targets

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, num_rows - batch.num_tokens))

    fields = StepFields(
        **{name: padded(values) for name, values in tokens.items()},
        req_pool_indices=padded(np.repeat(batch.rows, batch.num_new)),
        seq_lens=padded(tokens["positions"]) + 1,
        sampled_rows=sampled_rows,
        prompt_targets=targets if prompt_rows.size else None,
        run_indices=None if runs is None else last_rows[runs.places].ravel(),
        draft_ids=None if runs is None else runs.draft_ids.ravel(),
    )
    return StepPlan(
        fields=fields,
        is_decode=True,
        sampled=sampled,
        token_indices=last_rows,
        score_indices=prompt_indices,
        prompt_rows=prompt_rows,
        prompt_num_top=num_top(batch, prompt_rows),
        runs=runs,
    )


def with_media(plan: StepPlan, media: MediaPlan | None) -> StepPlan:
    """The plan with the positions that images make; unchanged without images."""
    if media is None:
        return plan
    plan.fields.positions = media.positions
    return replace(plan, media=media)


def _finish(
    batch: ScheduledBatch,
    fields: StepFields[np.ndarray],
    *,
    sampled: np.ndarray,
    is_decode: bool,
    prompt_rows: np.ndarray = _NONE,
    runs: RunPlan | None = None,
) -> StepPlan:
    """A plan where only sampled rows have logits, and only scored ones have scores."""
    return StepPlan(
        fields=fields,
        is_decode=is_decode,
        sampled=sampled,
        token_indices=np.arange(len(sampled)),
        score_indices=np.arange(len(prompt_rows)),
        prompt_rows=prompt_rows,
        prompt_num_top=num_top(batch, prompt_rows),
        runs=runs,
    )


def plan_runs(batch: ScheduledBatch, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, RunPlan]:
    """(index of the request [S], index into T [S]) of each token of a verify step behind which one is sampled; ends:
    [R] the end of each request's tokens."""
    requests = batch.sample_mask.nonzero()[0]
    counts = np.where(requests < batch.num_decodes, batch.num_new[requests], 1)
    ends_of_runs = counts.cumsum()
    starts = ends_of_runs - counts
    last_tokens = np.arange(ends_of_runs[-1]) + (ends[requests] - ends_of_runs).repeat(counts)
    columns = np.arange(counts.max())
    places = starts[:, None] + np.minimum(columns, counts[:, None] - 1)
    # Decodes come first: what is drafted for one is behind its own last token.
    draft_ids = np.full((requests.size, columns.size - 1), NO_TOKEN, dtype=np.int64)
    drafted = columns[1:] < counts[:, None]
    draft_ids[drafted] = batch.verify_token_ids[last_tokens[places[:, 1:][drafted]]]
    return requests.repeat(counts), last_tokens, RunPlan(requests, places, draft_ids)


def token_positions(batch: ScheduledBatch) -> np.ndarray:
    """[T] int64: each token's place within its request."""
    return _positions(batch, np.add.accumulate(batch.num_new, dtype=np.int64) - batch.num_new)


def _positions(batch: ScheduledBatch, starts: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.arange(batch.num_tokens) + (batch.prefix_lens - starts).repeat(batch.num_new)
    return found


def _tokens(batch: ScheduledBatch, starts: np.ndarray, pages: HostPageTable) -> dict[str, np.ndarray]:
    """The token inputs, [T] each; starts: [R] each request's first token."""
    positions = _positions(batch, starts)
    input_ids = batch.prefill_token_ids
    if batch.has_drafts:
        input_ids = np.concatenate((batch.verify_token_ids, input_ids))
    elif batch.num_decodes:
        input_ids = np.concatenate((np.zeros(batch.num_decodes, dtype=np.int64), input_ids))
    slots = pages.slots(batch.rows.repeat(batch.num_new), positions)
    return {"input_ids": input_ids, "positions": positions, "out_cache_loc": slots}


def prompt_positions(batch: ScheduledBatch, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, index into T, next prompt token) of each new token that predicts a prompt token, where that is wanted.

    A loop over requests: few ask for it, and each only while its prompt is computed.
    """
    if not batch.prompt_logprob_rows.any():
        return _NONE, _NONE, _NONE
    parts = [(_NONE, _NONE, _NONE)]
    for row in np.flatnonzero(batch.prompt_logprob_rows).tolist():
        prompt, prefix = batch.requests[row].prompt_token_ids, int(batch.prefix_lens[row])
        targets = np.asarray(prompt[prefix + 1 : prefix + 1 + int(batch.num_new[row])], dtype=np.int64)
        parts.append((np.full(targets.size, row), starts[row] + np.arange(targets.size), targets))
    rows, indices, targets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return rows, indices, targets


def num_top(batch: ScheduledBatch, prompt_rows: np.ndarray) -> int:
    if not prompt_rows.size:
        return 0
    return max(batch.requests[row].params.prompt_logprobs or 0 for row in np.unique(prompt_rows))
