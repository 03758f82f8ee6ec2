"""Puts a planned step into arrays: the decodes' constant part, kept between steps, and the chunks of prompts behind it.

scheduler.py decides a step's content. Free of torch. R rows, N page writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import NO_DRAFTS, ScheduledBatch

NO_TOKENS = np.empty(0, dtype=np.int64)
NO_TOKENS.setflags(write=False)
NO_COPIES = np.empty((0, 2), dtype=np.int64)
NO_COPIES.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class RunningDecodes:
    """The constant part of decode-only batches, made anew only when the set of decoding requests changes."""

    requests: list[Request]
    rows: np.ndarray
    num_new: np.ndarray
    sample_mask: np.ndarray
    rope_lens: np.ndarray
    adapter_slots: np.ndarray
    prompt_logprob_rows: np.ndarray

    @classmethod
    def of(cls, requests: list[Request]) -> RunningDecodes:
        count = len(requests)
        made = cls(
            requests,
            np.array([request.row for request in requests], dtype=np.int32),
            np.ones(count, dtype=np.int32),
            np.ones(count, dtype=bool),
            np.zeros(count, dtype=np.int32),
            np.array([request.adapter_slot for request in requests], dtype=np.int32),
            np.zeros(count, dtype=bool),
        )
        ints = made.rows, made.num_new, made.rope_lens, made.adapter_slots
        for shared in (*ints, made.sample_mask, made.prompt_logprob_rows):
            shared.setflags(write=False)
        return made


NO_DECODES = RunningDecodes.of([])


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One row of prompt tokens."""

    request: Request
    start: int  # tokens computed before
    token_ids: np.ndarray  # [length] int64
    is_last: bool  # reaches the prefill's end, so a token is sampled


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """The drafts of a step's decodes.

    Attributes:
        token_ids: as ScheduledBatch.verify_token_ids.
        num_new: [decodes] int32: new tokens of each; None: one.
        device_lens: as ScheduledBatch's.
    """

    token_ids: np.ndarray
    num_new: np.ndarray | None
    device_lens: np.ndarray | None = None

    @classmethod
    def of(cls, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> Drafted:
        """The drafts of these decodes, which have known last tokens."""
        ids: list[int] = []
        for request, draft in zip(requests, drafts, strict=True):
            ids.append(request.output_token_ids[-1])
            ids.extend(draft)
        return cls(np.array(ids, dtype=np.int64), np.array([1 + len(draft) for draft in drafts], dtype=np.int32))


NOTHING_DRAFTED = Drafted(NO_DRAFTS, None)


def build_batch(
    step_id: int,
    decodes: RunningDecodes,
    decode_prefix_lens: np.ndarray,
    chunks: list[Chunk],
    page_writes: tuple[np.ndarray, np.ndarray, np.ndarray],
    cleared_pages: np.ndarray,
    admitted: list[Request],
    state_restores: np.ndarray = NO_COPIES,
    state_saves: np.ndarray = NO_COPIES,
    drafted: Drafted = NOTHING_DRAFTED,
    encoded: Sequence[Request] = (),
) -> ScheduledBatch:
    """The batch of one step; without chunks and drafts it shares all that is constant with the steps around it."""
    requests, rows, num_new, prefix_lens = decodes.requests, decodes.rows, decodes.num_new, decode_prefix_lens
    if drafted.num_new is not None:
        num_new = drafted.num_new
    sample_mask, rope_lens, prompt_logprob_rows = decodes.sample_mask, decodes.rope_lens, decodes.prompt_logprob_rows
    adapter_slots, prefill_token_ids = decodes.adapter_slots, NO_TOKENS
    if chunks:
        requests = requests + [chunk.request for chunk in chunks]
        rows = _append(rows, [chunk.request.row for chunk in chunks])
        num_new = _append(num_new, [chunk.token_ids.size for chunk in chunks])
        prefix_lens = _append(prefix_lens, [chunk.start for chunk in chunks])
        sample_mask = _append(sample_mask, [chunk.is_last for chunk in chunks])
        rope_lens = _append(rope_lens, [chunk.request.rope_len for chunk in chunks])
        adapter_slots = _append(adapter_slots, [chunk.request.adapter_slot for chunk in chunks])
        prompt_logprob_rows = _append(prompt_logprob_rows, [chunk.request.needs_prompt_logprobs for chunk in chunks])
        prefill_token_ids = chunks[0].token_ids
        if len(chunks) > 1:
            prefill_token_ids = np.concatenate([chunk.token_ids for chunk in chunks])
    num_decode_tokens = drafted.token_ids.size or len(decodes.requests)
    if drafted.device_lens is not None:
        num_decode_tokens = int(num_new.sum())
    page_rows, page_positions, page_ids = page_writes
    return ScheduledBatch(
        step_id=step_id,
        requests=requests,
        rows=rows,
        num_new=num_new,
        prefix_lens=prefix_lens,
        num_decodes=len(decodes.requests),
        num_tokens=num_decode_tokens + prefill_token_ids.size,
        page_rows=page_rows,
        page_positions=page_positions,
        page_ids=page_ids,
        cleared_pages=cleared_pages,
        prefill_token_ids=prefill_token_ids,
        sample_mask=sample_mask,
        rope_lens=rope_lens,
        adapter_slots=adapter_slots,
        prompt_logprob_rows=prompt_logprob_rows,
        admitted=admitted,
        state_restores=state_restores,
        state_saves=state_saves,
        verify_token_ids=drafted.token_ids,
        device_lens=drafted.device_lens,
        encoded=encoded,
    )


def _append(array: np.ndarray, values: Sequence[int]) -> np.ndarray:
    added = np.array(values, dtype=array.dtype)
    return np.concatenate([array, added]) if array.size else added
