"""The sum over a weight's bytes: the same wherever they are, another one after any change."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.weights.sums import _words, weight_sums

ROW_BYTES = 8 * 8192
SIZES = st.sampled_from([1, 7, 8, 9, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 3 * ROW_BYTES + 5, 513 * ROW_BYTES])


def sum_of(weight: torch.Tensor) -> int:
    return weight_sums({"weight": weight})["weight"]


@cache
def pattern(size: int) -> torch.Tensor:
    """Not to be changed in place: it is every test's."""
    return (torch.arange(size) * 37 % 251).to(torch.uint8)


@cache
def sum_of_pattern(size: int) -> int:
    return sum_of(pattern(size))


@given(SIZES, st.data())
def test_changed_bytes_change_the_sum(size, data):
    weight, whole = pattern(size).clone(), sum_of_pattern(size)
    first = data.draw(st.integers(0, size - 1))
    count = data.draw(st.sampled_from([1, 2, 2000]))
    weight[first : first + count] ^= data.draw(st.integers(1, 255))
    assert sum_of(weight) != whole


def test_swapped_rows_words_and_lengths_change_the_sum():
    weight = pattern(4 * ROW_BYTES)
    rows, words = weight.view(4, -1), weight.view(-1, 8)
    swapped = {
        "whole": weight,
        "rows": rows.flip(0).reshape(-1),
        "words": words.flip(0).reshape(-1),
        "longer": torch.cat([weight, weight.new_zeros(8)]),
        "shorter": weight[:-8],
        "zeros": torch.zeros_like(weight),
        "more zeros": weight.new_zeros(len(weight) + 8),
    }
    assert len(set(weight_sums({name: value.clone() for name, value in swapped.items()}).values())) == len(swapped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_it_is_of_the_bytes_whatever_their_type_shape_and_place(dtype):
    weight = pattern(5 * ROW_BYTES) % 2
    expected = sum_of(weight)
    moved = torch.cat([weight.new_zeros(3), weight])[3:]
    assert sum_of(weight.view(dtype).view(5, -1)) == sum_of(moved) == expected


def test_memory_that_others_give_is_not_read_in_words_that_it_does_not_begin_at():
    memory = bytearray(2 * ROW_BYTES)
    for first in range(8, 16):
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=ROW_BYTES, offset=first)
        assert _words(flat).data_ptr() % 8 == 0, "a GPU has no such access"


def test_no_weights_and_empty_ones_have_sums():
    assert weight_sums({}) == {}
    assert sum_of(torch.empty(0)) == 0
