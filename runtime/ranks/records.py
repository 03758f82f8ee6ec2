"""A step as a record of bytes: a header of numbers, then arrays of fixed names and types. No objects.

What followers need of a ScheduledBatch; its requests stay with rank 0, which samples. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch

# Arrays of a record, in order; those of ScheduledBatch have its names.
_ARRAYS = (
    ("rows", np.int32),
    ("num_new", np.int32),
    ("prefix_lens", np.int32),
    ("page_rows", np.int32),
    ("page_positions", np.int32),
    ("page_ids", np.int32),
    ("cleared_pages", np.int32),
    ("prefill_token_ids", np.int64),
    ("rope_lens", np.int32),
    ("sample_mask", np.bool_),
    ("scored_indices", np.int64),
    ("state_restores", np.int64),
    ("state_saves", np.int64),
)
_COPIES = ("state_restores", "state_saves")  # [N, 2]
_HEADER = 4  # int64 numbers ahead of the arrays' lengths: step, decodes, tokens, whether prompt positions are scored
_HEADER_BYTES = 8 * (_HEADER + len(_ARRAYS))
_NO_SCORES = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class StepRecord:
    """A step that a follower runs.

    Attributes:
        batch: without requests' own data.
        scored_indices: tokens whose logits are asked for besides; None: none are.
    """

    batch: ScheduledBatch
    scored_indices: np.ndarray | None


def most_record_bytes(max_num_tokens: int, max_rows: int, pages_of_row: int) -> int:
    """Bytes that no record exceeds.

    Args:
        pages_of_row: most pages of one request.
    """
    per_token, per_row, per_page = 16, 17 + 2 * 16, 16
    largest = per_token * max_num_tokens + max_rows * (per_row + per_page * pages_of_row)
    return _HEADER_BYTES + 8 * len(_ARRAYS) + largest


def write_step(memory: memoryview, batch: ScheduledBatch, scored_indices: np.ndarray | None) -> int:
    """Writes a record to the start of `memory`; returns its bytes.

    Raises:
        ValueError: it does not fit.
    """
    header = np.frombuffer(memory, dtype=np.int64, count=_HEADER + len(_ARRAYS))
    header[:_HEADER] = batch.step_id, batch.num_decodes, batch.num_tokens, scored_indices is not None
    start = _HEADER_BYTES
    for index, (name, dtype) in enumerate(_ARRAYS):
        is_scores = name == "scored_indices"
        values = (_NO_SCORES if scored_indices is None else scored_indices) if is_scores else getattr(batch, name)
        size = values.size
        header[_HEADER + index] = size
        if size:
            np.frombuffer(memory, dtype=dtype, count=size, offset=start)[:] = values.ravel()
            start += -(-size * np.dtype(dtype).itemsize // 8) * 8
    return start


def read_step(memory: memoryview) -> StepRecord:
    """Reads what write_step wrote; the arrays are copies."""
    header = np.frombuffer(memory, dtype=np.int64, count=_HEADER + len(_ARRAYS)).tolist()
    step_id, num_decodes, num_tokens, is_scored, *sizes = header
    start = _HEADER_BYTES
    arrays: dict[str, np.ndarray] = {}
    for (name, dtype), size in zip(_ARRAYS, sizes, strict=True):
        arrays[name] = np.frombuffer(memory, dtype=dtype, count=size, offset=start if size else 0).copy()
        start += -(-size * np.dtype(dtype).itemsize // 8) * 8
    scored = arrays.pop("scored_indices")
    batch = ScheduledBatch(
        step_id=step_id,
        requests=[None] * arrays["rows"].size,  # type: ignore[list-item]  # their number is what is looked at
        num_decodes=num_decodes,
        num_tokens=num_tokens,
        prompt_logprob_rows=np.zeros(arrays["rows"].size, dtype=bool),
        admitted=[],
        **{name: arrays.pop(name).reshape(-1, 2) for name in _COPIES},
        **arrays,
    )
    return StepRecord(batch, scored if is_scored else None)
