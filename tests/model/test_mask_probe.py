"""Keys that a mask function lets a call see: a window or all earlier keys, at any distance; anything else is
refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.mask_probe import ObservedCall, Reach, _Observer


@pytest.mark.parametrize(
    ("mask", "window_left"),
    [
        (None, -1),
        (causal_mask_function, -1),
        (sliding_window_causal_mask_function(1), 0),
        (sliding_window_causal_mask_function(8), 7),
        (sliding_window_causal_mask_function(4096), 4095),
        (sliding_window_causal_mask_function(100_003), 100_002),
        (and_masks(causal_mask_function, sliding_window_causal_mask_function(512)), 511),
    ],
)
def test_a_causal_mask_is_its_window(mask, window_left):
    assert ObservedCall(mask).reach() == Reach(window_left)


@pytest.mark.parametrize("chunk", [2, 8, 3001, 8192])
def test_chunks_of_positions_are_told(chunk):
    mask = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    assert ObservedCall(mask).reach() == Reach(chunk=chunk)


def every_second(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return ((query - key) % 2 == 0) & (key <= query)


def never_the_first(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) & (key > 0)


def chunks_that_end(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) & ((key // 256 == query // 256) | (query >= 1024))


OTHERS = {
    "chunks that do not begin at 0": chunked_causal_mask_function(3001, torch.full((1,), 5)),
    "chunks that end": chunks_that_end,
    "both directions": bidirectional_mask_function,
    "a window in both directions": sliding_window_bidirectional_mask_function(8),
    "a strided pattern": every_second,
    "a position that nobody sees": never_the_first,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_mask_is_refused(kind):
    with pytest.raises(UnsupportedModelError, match="neither causal nor a causal window"):
        ObservedCall(OTHERS[kind]).reach()


@pytest.mark.parametrize(
    "mask",
    [
        packed_sequence_mask_function(torch.zeros(1, 2, dtype=torch.int64)),
        or_masks(causal_mask_function, blockwise_overlay(torch.zeros(1, 2, dtype=torch.int64))),
    ],
    ids=["packed sequences", "blocks of image tokens"],
)
def test_a_mask_that_reads_the_texts_is_refused(mask):
    with pytest.raises(UnsupportedModelError, match="no rule on positions alone"):
        ObservedCall(mask).reach()


def test_a_mask_that_the_model_changed_is_refused():
    with pytest.raises(UnsupportedModelError, match="the model changes its attention mask"):
        ObservedCall(None, is_altered=True).reach()


def test_ids_of_blocks_that_are_the_same_for_all_tokens_are_so_for_any_text():
    observer = _Observer("cpu")
    ids = torch.full((1, 2), -1)
    mask = or_masks(causal_mask_function, blockwise_overlay(ids))
    observer.make_mask(2, 2, mask)
    assert ObservedCall(observer.masks[0]).reach() == Reach()
    observer.make_mask(2, 2, or_masks(causal_mask_function, blockwise_overlay(torch.tensor([[0, -1]]))))
    with pytest.raises(UnsupportedModelError, match="no rule on positions alone"):
        ObservedCall(observer.masks[1]).reach()
