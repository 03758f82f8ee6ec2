"""One engine step: ScheduledBatch → ForwardBatch → logits → tokens, with the host never waiting for the device.

Sampled ids stay on the device, where the next step's decodes take them from; the host gets a copy when it asks. Host
work of a step: one packed upload, one asynchronous download. Steps run in the order in which they are submitted, on one
stream, so a step may be submitted before the tokens of the one before are known.

Shape legend: R rows (requests) of a step, T tokens, S sampled rows, N prompt positions whose log-probabilities are
wanted, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mllm_compile.runtime.counter_rng import derive_seed
from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.forward_batch import ForwardBatch
from mllm_compile.runtime.logprobs import TokenLogprobs, token_logprobs
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.request import Request
from mllm_compile.runtime.sampler import Sampler
from mllm_compile.runtime.sampling_state import SamplingState
from mllm_compile.runtime.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step_output import ScoreTable, StepOutput
from mllm_compile.runtime.upload import upload

_ALIGNMENT = 16  # bytes; every field of a packed upload starts at a multiple, so that it can be viewed in its dtype


class StepHandle:
    """A step that was launched; `wait` gives what it brought."""

    def __init__(self, batch: ScheduledBatch, plan: _StepPlan, results: _Results) -> None:
        self._batch = batch
        self._plan = plan
        self._results = results

    def wait(self) -> StepOutput:
        """Block until the step is over.

        Raises:
            RuntimeError: what went wrong on the device, in this step or one before it.
        """
        tokens, scores, prompt_scores = self._results.fetch()
        plan = self._plan
        token_ids = np.full(self._batch.num_requests, -1, dtype=np.int64)
        token_ids[plan.sampled] = tokens
        return StepOutput(
            token_ids=token_ids,
            requests=self._batch.requests,
            scores=None if scores is None else ScoreTable(tokens, *scores),
            score_rows=plan.sampled,
            prompt_scores=None if prompt_scores is None else ScoreTable(plan.prompt_targets, *prompt_scores),
            prompt_rows=plan.prompt_rows,
        )


class StepRunner:
    """Runs ScheduledBatches on a ModelRunner. Used by one thread.

    Attributes:
        state: sampling parameters of the requests that hold a slot.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        num_rows = runner.max_running_requests + 1
        self.state = SamplingState(num_rows, runner.vocab_size, runner.device)
        self._last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=runner.device)
        self._slot_owners: dict[int, Request] = {}  # requests whose parameters are in `state`
        self._seen_requests: list[Request] | None = (
            None  # of the last batch; the same object while nobody comes or goes
        )

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Launch a step without waiting for it, nor for the one before.

        Raises:
            DeviceMemoryError: the step's activations do not fit; the step has not happened.
        """
        try:
            with torch.inference_mode(), self._runner.on_device():
                return self._submit(batch)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"a step of {batch.num_tokens} tokens of {batch.num_requests} requests ran out of memory: {error} "
                "Lower runtime.mem_fraction_static or runtime.max_num_batched_tokens, or ask for fewer prompt_logprobs "
                "at once."
            ) from error

    def _submit(self, batch: ScheduledBatch) -> StepHandle:
        self._follow_slots(batch)
        plan = _plan(batch, self._runner.req_to_token_pool.max_context_len)
        fields = _upload_fields(plan.fields, self._runner.device)
        pool = self._runner.req_to_token_pool
        if batch.page_ids.size:
            pool.write_pages(
                fields["page_rows"], fields["page_positions"], fields["page_ids"], self._runner.config.page_size
            )
        forward_batch = self._forward_batch(batch, plan, fields)
        logits = self._runner.forward(forward_batch).next_token_logits
        return StepHandle(batch, plan, self._sample(plan, fields, logits))

    def _forward_batch(self, batch: ScheduledBatch, plan: _StepPlan, fields: dict[str, torch.Tensor]) -> ForwardBatch:
        rows, seq_lens = fields["rows"], fields["seq_lens"]
        decode_ids = self._last_tokens.index_select(0, rows[: batch.num_decodes])
        out_cache_loc = self._runner.req_to_token_pool.req_to_token.flatten().index_select(0, fields["table_entries"])
        if batch.num_decodes == batch.num_requests:
            return self._runner.prepare_forward_batch_decode(
                decode_ids,
                rows,
                seq_lens,
                out_cache_loc.long(),
                seq_lens_cpu=torch.from_numpy(plan.seq_lens),
                positions=fields["positions"],
            )
        forward_batch = self._runner.prepare_forward_batch_extend(
            torch.cat((decode_ids, fields["prefill_ids"])),
            rows,
            seq_lens,
            fields["num_new"],
            fields["prefix_lens"],
            out_cache_loc.long(),
            num_decodes=batch.num_decodes,
            extend_seq_lens_cpu=torch.from_numpy(batch.num_new.copy()),
            extend_prefix_lens_cpu=torch.from_numpy(batch.prefix_lens.copy()),
            return_logprob=bool(plan.prompt_rows.size),
            positions=fields["positions"],
        )
        forward_batch.logits_indices = fields["logits_indices"]
        return forward_batch

    def _sample(self, plan: _StepPlan, fields: dict[str, torch.Tensor], logits: torch.Tensor) -> _Results:
        """Tokens of the first S rows of logits, log-probabilities of the rows behind them."""
        num_sampled = len(plan.sampled)
        tokens = scores = prompt_scores = None
        if num_sampled:
            slots = fields.get("sampled_slots", fields["rows"])
            positions = fields.get("sampled_positions", fields["seq_lens"])
            flags = self.state.flags
            output = self._sampler(logits[:num_sampled], self.state, slots, flags, positions)
            tokens, scores = output.token_ids, output.logprobs
            self._last_tokens.index_copy_(0, slots, tokens)
        if plan.prompt_rows.size:
            prompt_scores = token_logprobs(logits[num_sampled:], fields["prompt_targets"], plan.prompt_num_top)
        return _Results(tokens, scores, prompt_scores, self._runner.device)

    def _follow_slots(self, batch: ScheduledBatch) -> None:
        """Bring the sampling state up to who holds which slot; costs nothing while the requests stay the same."""
        if batch.requests is self._seen_requests and not batch.admitted:
            return
        self._seen_requests = batch.requests
        gone = [slot for slot, owner in self._slot_owners.items() if owner.is_finished or owner.slot != slot]
        for slot in gone:
            del self._slot_owners[slot]
            self.state.clear(slot)
        for request in batch.admitted:
            self._slot_owners[request.slot] = request
            self.state.set_request(
                request.slot,
                request.params,
                request.prompt_token_ids,
                derive_seed(self._runner.config.seed, request.sequence),
                output_token_ids=request.output_token_ids,
                stop_ids=request.stop_ids,
            )


_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _StepPlan:
    """What a step needs of its batch, as host arrays."""

    fields: dict[str, np.ndarray]  # to be uploaded together
    seq_lens: np.ndarray  # [R] int32
    sampled: np.ndarray  # [S]: rows whose logits are sampled
    prompt_rows: np.ndarray  # [N]: row of each prompt position that is scored
    prompt_targets: np.ndarray  # [N] int64: the prompt's next token there
    prompt_num_top: int = 0


def _plan(batch: ScheduledBatch, table_width: int) -> _StepPlan:
    rows = batch.rows.astype(np.int64)
    seq_lens = batch.seq_lens
    fields = {"rows": rows, "seq_lens": seq_lens}
    if batch.page_ids.size:
        fields["page_rows"] = batch.page_rows.astype(np.int64)
        fields["page_positions"] = batch.page_positions.astype(np.int64)
        fields["page_ids"] = batch.page_ids
    if batch.num_decodes == batch.num_requests:
        fields["positions"] = seq_lens.astype(np.int64) - 1
        fields["table_entries"] = rows * table_width + fields["positions"]
        return _StepPlan(fields, seq_lens, np.arange(batch.num_requests), _NONE, _NONE)

    ends = np.cumsum(batch.num_new, dtype=np.int64)
    starts = ends - batch.num_new
    fields["positions"] = np.arange(batch.num_tokens) + np.repeat(batch.prefix_lens - starts, batch.num_new)
    fields["table_entries"] = np.repeat(rows * table_width, batch.num_new) + fields["positions"]
    fields["prefill_ids"] = batch.prefill_token_ids
    fields["num_new"] = batch.num_new
    fields["prefix_lens"] = batch.prefix_lens
    sampled = np.flatnonzero(batch.sample_mask)
    if len(sampled) < batch.num_requests:
        fields["sampled_slots"] = rows[sampled]
        fields["sampled_positions"] = seq_lens[sampled]
    scored_rows, scored_indices, targets = _prompt_positions(batch, starts)
    indices = np.concatenate((ends[sampled] - 1, scored_indices))
    # The head takes at least one row; with nothing to sample its logits are not looked at.
    fields["logits_indices"] = indices if indices.size else ends[:1] - 1
    fields["prompt_targets"] = targets
    num_top = max((batch.requests[row].params.prompt_logprobs or 0 for row in np.unique(scored_rows)), default=0)
    return _StepPlan(fields, seq_lens, sampled, scored_rows, targets, num_top)


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


def _upload_fields(fields: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Upload all fields as one block of bytes: one pinned buffer, one copy."""
    offsets, end = [], 0
    for array in fields.values():
        offsets.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = np.empty(end, dtype=np.uint8)
    for array, offset in zip(fields.values(), offsets, strict=True):
        packed[offset : offset + array.nbytes].view(array.dtype)[:] = array
    block = upload(packed, device)
    return {
        name: block[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype.name])
        for (name, array), offset in zip(fields.items(), offsets, strict=True)
    }


_TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64}


class _Results:
    """Device tensors of a step on their way to the host."""

    def __init__(
        self,
        tokens: torch.Tensor | None,
        scores: TokenLogprobs | None,
        prompt_scores: TokenLogprobs | None,
        device: torch.device,
    ) -> None:
        self._tokens = None if tokens is None else _download([tokens])
        self._scores = None if scores is None else _download(_columns(scores))
        self._prompt_scores = None if prompt_scores is None else _download(_columns(prompt_scores))
        # Also for a step without results: the host must not run ahead of the device without bound.
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def fetch(self) -> tuple[np.ndarray, list[np.ndarray] | None, list[np.ndarray] | None]:
        """(tokens [S], columns of scores, columns of prompt scores), once the copies are over."""
        if self._event is not None:
            self._event.synchronize()
        tokens = _NONE if self._tokens is None else self._tokens[0].numpy()
        scores, prompt_scores = (
            None if tensors is None else [tensor.numpy() for tensor in tensors]
            for tensors in (self._scores, self._prompt_scores)
        )
        return tokens, scores, prompt_scores


def _columns(scores: TokenLogprobs) -> list[torch.Tensor]:
    """In ScoreTable's order."""
    return [scores.logprobs, scores.ranks, scores.top_token_ids, scores.top_logprobs]


def _download(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the host, in flight until the stream gets there; CPU tensors as they are."""
    return [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        if tensor.is_cuda
        else tensor
        for tensor in tensors
    ]
