"""Layers with a state as a program stores them, and how long a row of states is whose."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from mllm_compile.runtime import memory_pool
from mllm_compile.runtime.memory_pool import GDNPool
from mllm_compile.runtime.schedule.pages.state_snapshots import StateSnapshots
from mllm_compile.runtime.state.layer import Ssd, StateLayer
from tests.runtime.state.state_cases import KINDS, layer_of


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_comes_back_from_json_as_it_was(name):
    layer = layer_of(name)
    assert StateLayer.from_json(json.loads(json.dumps(layer.to_json()))) == layer


def test_a_bound_that_there_is_not_is_stored_too():
    layer = replace(layer_of("ssd"), kind=Ssd(dt_softplus=True, dt_min=0.0, dt_max=None))
    assert StateLayer.from_json(json.loads(json.dumps(layer.to_json(), allow_nan=False))) == layer


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "fourier"},
        {"settings": {}},
        {"settings": {"activation": 1}},
        {"operands": ["x", "y"]},
        {"state_shape": "3"},
        {"more": 1},
    ],
)
def test_a_layer_that_was_not_stored_so_is_refused(change):
    with pytest.raises((KeyError, TypeError, ValueError)):
        StateLayer.from_json(layer_of("conv").to_json() | change)


def test_inputs_keep_the_model_s_type_and_sums_have_their_own():
    assert layer_of("conv", torch.bfloat16).state_dtype("float32") == "bfloat16"
    assert layer_of("delta", torch.bfloat16).state_dtype("float32") == "float32"


def test_rows_are_copied_in_every_layer_and_counted_in_bytes():
    layers = [((2, 3), torch.float32), ((4,), torch.bfloat16)]
    pool = GDNPool(5, layers, "cpu")
    assert GDNPool.bytes_per_row(layers) == 2 * 3 * 4 + 4 * 2
    for index in range(2):
        states = pool.get_state(index)
        states.copy_(torch.arange(5).view(5, *[1] * (states.dim() - 1)).expand_as(states))
    pool.copy_rows(np.array([[1, 4], [4, 2]]))
    for index in range(2):
        assert [int(row.unique()) for row in pool.get_state(index)] == [0, 1, 4, 3, 1]


@pytest.mark.parametrize("most_bytes", [1, 100, 1 << 20])
def test_layers_alike_are_copied_together_and_begin_where_16_bytes_can_be_read(monkeypatch, most_bytes):
    monkeypatch.setattr(memory_pool, "_COPIED_BYTES", most_bytes)
    layers = [((2, 3), torch.float32), ((3,), torch.bfloat16)] * 3  # rows of 24 and of 6 bytes
    pool = GDNPool(5, layers, "cpu")
    assert all(pool.get_state(index).data_ptr() % 16 == 0 for index in range(6))
    before = []
    for index, (shape, dtype) in enumerate(layers):
        states = pool.get_state(index)
        assert (states.shape, states.dtype, states.is_contiguous()) == ((5, *shape), dtype, True)
        states.copy_(torch.randn(states.shape, generator=torch.Generator().manual_seed(index)))
        before.append(states.clone())
    pool.copy_rows(np.array([[1, 3], [4, 2]]))
    for index, states in enumerate(before):
        assert torch.equal(pool.get_state(index), states[[0, 1, 4, 1, 4]])
    pool.copy_rows(np.array([[4, 3]]))
    for index, states in enumerate(before):
        assert torch.equal(pool.get_state(index), states[[0, 1, 4, 4, 4]])


def test_the_least_recently_used_snapshot_makes_room_and_reserved_rows_do_not():
    states = StateSnapshots(first_row=7, count=2)
    first, second = states.reserve(), states.reserve()
    assert {first, second} == {7, 8} and states.reserve() is None, "all are of steps in flight"
    states.keep("a", first)
    states.keep("b", second)
    assert states.use("a") == first
    assert states.reserve() == second, "b was used longer ago"
    assert "b" not in states and "a" in states
    states.release(second)
    states.drop("a")
    states.drop("never kept")
    assert (states.num_free, states.num_kept) == (2, 0)
