"""A captured prefill's arguments for FlashInfer's plan where its own list is too short; the plan only notes them
here."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.flashinfer.prefill import CapturedPrefill

LAYOUT = [*range(0, 128, 16), False]
NUM_TOKENS, NUM_ROWS, HEADS, SMS = 64, 6, (16, 8, 128), 20
PAGES = np.arange(0, 70, 10, dtype=np.int32)


def planned(answer: list[int], first_row: int) -> list:
    given: list = []
    buffers = dict.fromkeys(("_float_workspace_buffer", "_int_workspace_buffer"), None)
    memory = torch.zeros(4096, dtype=torch.uint8)
    module = SimpleNamespace(plan=lambda *arguments: given.extend(arguments) or answer)
    wrapper = SimpleNamespace(
        _plan_info=LAYOUT, _cached_module=module, _pin_memory_int_workspace_buffer=memory, **buffers
    )
    space = SimpleNamespace(planning=lambda wrapper: nullcontext())
    prefill = CapturedPrefill(wrapper, space, (NUM_TOKENS, NUM_ROWS), PAGES, HEADS, 64, SMS)
    # Two prompts behind `first_row` decodes: 2 tiles of 16 heads are more than there are blocks.
    starts = np.array([0, 7, 11], dtype=np.int32) + first_row
    prefill.plan(starts, np.array([7, 13], dtype=np.int32), first_row)
    assert not memory.any(), "no list was written"
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in given[3:9]]


def test_rows_that_are_no_prompts_have_neither_queries_nor_keys():
    starts, first_pages, num_keys, *sizes = planned(LAYOUT, first_row=2)
    assert starts == [2, 2, 2, 9, 13, 13, 13]
    assert first_pages == PAGES.tolist()
    assert num_keys == [0, 0, 7, 13, 0, 0]
    assert sizes == [NUM_TOKENS, NUM_ROWS, 16]


def test_prompts_alone_are_the_first_rows():
    starts, _, num_keys, *_ = planned(LAYOUT, first_row=0)
    assert starts == [0, 7, 11, 11, 11, 11, 11]
    assert num_keys == [7, 13, 0, 0, 0, 0]


def test_a_plan_that_is_elsewhere_is_refused():
    with pytest.raises(RuntimeError, match=r"plan has moved from .* Set cudagraph.mixed_tokens: \[\]"):
        planned(LAYOUT[::-1], first_row=0)
