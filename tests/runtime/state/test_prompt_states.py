"""Inputs of layers with a state from captured prompts alone, as the host writes them."""

from __future__ import annotations

import numpy as np
import torch

from mllm_compile.runtime.attention.metadata import StepPrompts
from mllm_compile.runtime.state.mixed import MOST_PROMPTS, PromptStates


def prompts(lengths: list[int], cached: list[int]) -> StepPrompts:
    """Requests from row 3 on; the first one's state is read in row 40."""
    starts = np.array([0, *np.cumsum(lengths)], dtype=np.int32)
    rows = np.arange(len(lengths)) + 3
    return StepPrompts(starts, np.array(cached, dtype=np.int32), rows, np.array([40, *rows[1:]]), lambda: starts[:0])


def test_kernels_find_rows_flags_and_bounds_and_padding_behind_them():
    work = torch.full((PromptStates.num_bytes,), 77, dtype=torch.uint8)
    step = PromptStates.capture(work)
    assert step.of_decodes is None and all(part.data_ptr() % 16 == 0 for part in step.of_prompts)
    for lengths, cached in (([5, 2, 9], [16, 0, 33]), ([7], [0])):
        assert PromptStates.write(work.numpy(), prompts(lengths, cached))
        count, ends = len(lengths), np.cumsum(lengths).tolist()
        rows = list(range(3, 3 + count))
        expected = rows, [before > 0 for before in cached], [40, *rows[1:]], [0, *ends[:-1]], ends
        for part, values in zip(step.of_prompts, expected, strict=True):
            assert part.tolist() == values + [0] * (MOST_PROMPTS - count)


def test_more_prompts_than_places_are_not_written():
    memory = np.full(PromptStates.num_bytes, 77, dtype=np.uint8)
    most = [1] * MOST_PROMPTS
    assert not PromptStates.write(memory, prompts([*most, 1], [*most, 1])) and (memory == 77).all()
    assert PromptStates.write(memory, prompts(most, most))
