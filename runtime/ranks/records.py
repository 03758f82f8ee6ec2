"""A step as a record of bytes: a header of numbers, then arrays of fixed names and types. No objects.

The part of a ScheduledBatch that followers need; its requests stay with rank 0, which samples. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from mllm_compile.runtime.media.step_plan import NO_ROWS, MediaPlan
from mllm_compile.runtime.media.tower import MAX_FEATURES
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch

# Arrays of a record, in order; arrays of ScheduledBatch have its names.
_ARRAYS = (
    ("rows", np.int32),
    ("num_new", np.int32),
    ("prefix_lens", np.int32),
    ("page_rows", np.int32),
    ("page_positions", np.int32),
    ("page_ids", np.int32),
    ("cleared_pages", np.int32),
    ("prefill_token_ids", np.int64),
    ("verify_token_ids", np.int64),
    ("device_lens", np.int32),  # absent from a step whose drafts the device does not make
    ("rope_lens", np.int32),
    ("adapter_slots", np.int32),
    ("sample_mask", np.bool_),
    ("scored_indices", np.int64),
    ("state_restores", np.int64),
    ("state_saves", np.int64),
    # Of MediaPlan; absent from a step without images.
    ("positions", np.int64),
    ("deltas", np.int32),
    ("feature_rows", np.int64),
    ("feature_axes", np.int64),
    ("run_sizes", np.int64),
    ("run_rows", np.int64),
    ("blocks", np.int64),
)
_COPIES = ("state_restores", "state_saves")  # [N, 2]
_MEDIA_ARRAYS = ("positions", "deltas", "feature_rows", "feature_axes", "run_sizes", "run_rows", "blocks")
# int64 numbers ahead of the arrays' lengths: step, decodes, tokens, whether prompt positions are scored, the choice.
_HEADER = 5
_HEADER_BYTES = 8 * (_HEADER + len(_ARRAYS))
_NO_SCORES, _NO_LENS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)


class SamplingMode(IntEnum):
    """The ranks that choose the tokens of a step, so that all ranks have them."""

    SAMPLED = 0  # rank 0, behind the model; then it broadcasts them
    IN_GRAPH = 1  # rank 0, in the graph of a step that is one launch, which broadcasts them; else as SAMPLED
    GREEDY_ACROSS_RANKS = 2  # each rank in its part of the vocabulary; all take the likeliest of these


@dataclass(frozen=True)
class StepRecord:
    """A step that a follower runs.

    Attributes:
        batch: without requests' own data.
        scored_indices: [N] tokens whose logits are asked for besides; None: none are.
        media: positions and features, where requests have images.
    """

    batch: ScheduledBatch
    scored_indices: np.ndarray | None = None
    media: MediaPlan | None = None
    choice: SamplingMode = SamplingMode.SAMPLED


def most_record_bytes(max_num_tokens: int, max_rows: int, pages_of_row: int, dp_size: int = 1) -> int:
    """Bytes that no record exceeds.

    Args:
        pages_of_row: most pages of one request.
        dp_size: ranks that have images of their own in a step.
    """
    per_token, per_row, per_page = 16 + 8 + 40 + 32, 29 + 2 * 16, 16
    largest = 2 * 8 * MAX_FEATURES * dp_size  # that runs of a tower fill, and at most as many runs
    largest += per_token * max_num_tokens + max_rows * (per_row + per_page * pages_of_row)
    return _HEADER_BYTES + 8 * len(_ARRAYS) + largest


def write_step(memory: memoryview, record: StepRecord) -> int:
    """Writes a record to the start of `memory`; returns its bytes.

    Raises:
        ValueError: it does not fit.
    """
    batch, scored_indices = record.batch, record.scored_indices
    others = {"scored_indices": _NO_SCORES if scored_indices is None else scored_indices}
    others["device_lens"] = _NO_LENS if batch.device_lens is None else batch.device_lens
    others |= _media_arrays(record.media)
    header = np.frombuffer(memory, dtype=np.int64, count=_HEADER + len(_ARRAYS))
    is_scored = scored_indices is not None
    header[:_HEADER] = batch.step_id, batch.num_decodes, batch.num_tokens, is_scored, record.choice
    start = _HEADER_BYTES
    for index, (name, dtype) in enumerate(_ARRAYS):
        values = others[name] if name in others else getattr(batch, name)
        size = values.size
        header[_HEADER + index] = size
        if size:
            np.frombuffer(memory, dtype=dtype, count=size, offset=start)[:] = values.ravel()
            start += -(-size * np.dtype(dtype).itemsize // 8) * 8
    return start


def read_step(memory: memoryview) -> StepRecord:
    """Reads what write_step wrote; the arrays are copies."""
    header = np.frombuffer(memory, dtype=np.int64, count=_HEADER + len(_ARRAYS)).tolist()
    step_id, num_decodes, num_tokens, is_scored, choice, *sizes = header
    start = _HEADER_BYTES
    arrays: dict[str, np.ndarray] = {}
    for (name, dtype), size in zip(_ARRAYS, sizes, strict=True):
        arrays[name] = np.frombuffer(memory, dtype=dtype, count=size, offset=start if size else 0).copy()
        start += -(-size * np.dtype(dtype).itemsize // 8) * 8
    scored, device_lens = arrays.pop("scored_indices"), arrays.pop("device_lens")
    media = _media_of({name: arrays.pop(name) for name in _MEDIA_ARRAYS})
    batch = ScheduledBatch(
        step_id=step_id,
        requests=[None] * arrays["rows"].size,  # type: ignore[list-item]  # their number is what is looked at
        num_decodes=num_decodes,
        num_tokens=num_tokens,
        prompt_logprob_rows=np.zeros(arrays["rows"].size, dtype=bool),
        admitted=[],
        device_lens=device_lens if device_lens.size else None,
        encoded=(),
        **{name: arrays.pop(name).reshape(-1, 2) for name in _COPIES},
        **arrays,
    )
    return StepRecord(batch, scored if is_scored else None, media, SamplingMode(choice))


def _media_arrays(media: MediaPlan | None) -> dict[str, np.ndarray]:
    if media is None:
        return dict.fromkeys(_MEDIA_ARRAYS, NO_ROWS)
    sizes = np.array([rows.size for rows in media.runs], dtype=np.int64)
    rows = np.concatenate(media.runs) if media.runs else NO_ROWS
    values = media.positions, media.deltas, media.rows, media.axes.ravel(), sizes, rows, media.blocks.ravel()
    return dict(zip(_MEDIA_ARRAYS, values, strict=True))


def _media_of(arrays: dict[str, np.ndarray]) -> MediaPlan | None:
    positions, deltas, rows, axes, sizes, run_rows, blocks = (arrays[name] for name in _MEDIA_ARRAYS)
    if not positions.size:
        return None
    runs = tuple(np.split(run_rows, np.cumsum(sizes)[:-1])) if sizes.size else ()
    axes = axes.reshape(-1, positions.size) if rows.size else NO_ROWS
    return MediaPlan(positions, deltas, rows, axes, runs, blocks.reshape(-1, 4))
