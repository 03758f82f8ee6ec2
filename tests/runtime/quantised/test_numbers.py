"""Rounding to the nearest is within half a step of a scheme's numbers, whatever the sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mllm_compile.runtime.quantised.numbers import dequantised, in_lanes, paired, quantised
from mllm_compile.runtime.quantised.scheme import VALUES, WeightScheme, quantised_as
from mllm_compile.runtime.weights.formats.registry import fill_quantised

SCHEMES = {
    "fp8 rows": WeightScheme("fp8", 200),
    "fp8 groups": WeightScheme("fp8", 128),
    "int4": WeightScheme("int4", 128, torch.bfloat16),
    "int4 small groups": WeightScheme("int4", 16, torch.float16),
    "int4 with zero points": WeightScheme("int4", 64, torch.float16, has_zeros=True),
}


def weight_of(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)) + 0.3


def stands_for(tensors: dict[str, torch.Tensor], scheme: WeightScheme, columns: int) -> torch.Tensor:
    return dequantised(tensors, scheme.kind, scheme.group, columns, torch.float32)


def steps(weight: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """[N, K]: the largest distance of neighbouring numbers in a weight's own group."""
    found = torch.empty_like(weight)
    for start in range(0, weight.shape[1], scheme.group):
        group = weight[:, start : start + scheme.group]
        low, high = group.amin(1).clamp(max=0), group.amax(1).clamp(min=0)
        if scheme.kind == "fp8":
            width = group.abs().amax(1) / 14  # 448 / 32, the distance of the largest
        else:
            width = (high - low) / 15 if scheme.has_zeros else group.abs().amax(1) / 7.5
        found[:, start : start + scheme.group] = width[:, None]
    return found


@pytest.mark.parametrize("shape", [(24, 200), (7, 129), (3, 5)])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_quantised_weight_is_within_a_step_of_the_plain_one(name, shape):
    scheme, weight = SCHEMES[name], weight_of(*shape)
    tensors = quantised(weight, scheme)
    for role, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (scheme.shape(role, *shape), scheme.dtype(role))
    assert sum(tensor.nbytes for tensor in tensors.values()) == scheme.num_bytes(*shape)
    error = (stands_for(tensors, scheme, shape[1]) - weight).abs()
    # Half a step for rounding; a whole one where the scale, or the zero point, is rounded as well.
    assert (error <= steps(weight, scheme) * (0.51 if scheme.kind == "fp8" else 1.05)).all()


@pytest.mark.parametrize("has_zeros", [False, True])
def test_values_in_lanes_are_the_same_numbers_in_another_order(has_zeros):
    plain = WeightScheme("int4", 128, torch.bfloat16, has_zeros)
    scheme = plain.of_linear(384)
    assert (scheme.kind, scheme.name, plain.of_linear(320)) == ("int4_lanes", "int4", plain)
    weight = weight_of(24, 384)
    ours, theirs = quantised(weight, scheme), quantised(weight, plain)
    assert torch.equal(stands_for(ours, scheme, 384), stands_for(theirs, plain, 384))
    assert torch.equal(ours[VALUES], in_lanes(theirs[VALUES]))
    assert not torch.equal(ours[VALUES], theirs[VALUES])


def test_a_lanes_word_is_what_it_gives_to_two_products():
    numbers = torch.arange(32, dtype=torch.uint8)
    words = [in_lanes(paired(one[None])).view(4, 4) for one in (numbers & 15, numbers >> 4)]  # of four bits each
    for lane in range(4):
        low, high = ([code >> shift & 15 for code in word[lane].tolist() for shift in (0, 4)] for word in words)
        inputs = [a + 16 * b for a, b in zip(low, high, strict=True)]
        first = [2 * lane, 2 * lane + 8, 2 * lane + 16, 2 * lane + 24]
        assert inputs == [*first, *(one + 1 for one in first)]


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_of_zeros_stay_zeros(name):
    scheme = SCHEMES[name]
    assert not stands_for(quantised(torch.zeros(4, 200), scheme), scheme, 200).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", SCHEMES)
def test_nan_shows_in_the_scales(name, value):
    weight = weight_of(4, 200)
    weight[2, 7] = value
    assert not quantised(weight, SCHEMES[name])["scales"][2].isfinite().all()


@pytest.mark.parametrize("most", [1000, 10_000, 100_000])
@pytest.mark.parametrize("shape", [(24, 200), (5, 24, 200)])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_few_rows_at_a_time_are_the_same(name, shape, most, monkeypatch):
    from mllm_compile.runtime.quantised import numbers
    from mllm_compile.runtime.weights.formats import registry

    scheme, weight = SCHEMES[name], weight_of(120, 200)[-math.prod(shape[:-1]) :].view(shape)
    whole = quantised(weight, scheme)
    monkeypatch.setattr(registry, "_MOST_VALUES", most)
    places = {role: torch.empty_like(tensor) for role, tensor in whole.items()}
    fill_quantised(places, weight, scheme, dict.fromkeys(places, lambda tensor: tensor))
    assert all(torch.equal(places[role].view(torch.uint8), whole[role].view(torch.uint8)) for role in whole)
    expected = stands_for(whole, scheme, 200)
    monkeypatch.setattr(numbers, "_MOST_VALUES", most)
    assert torch.equal(stands_for(whole, scheme, 200), expected)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_weight_stays_as_it_is(name, dtype):
    weight = weight_of(24, 200).to(dtype)
    before = weight.clone()
    quantised(weight, SCHEMES[name])
    assert torch.equal(weight, before)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(4096, 2048), (128, 64, 1024)])
def test_a_device_launches_few_kernels_for_a_weight(name, shape):
    """A launch takes some 5 us, as long as a GPU takes to quantise 200,000 values."""

    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.count += not op.is_view
            return op(*args, **(kwargs or {}))

    scheme, weight = SCHEMES[name], torch.empty(shape, dtype=torch.bfloat16, device="meta")
    places = {
        role: torch.empty(scheme.shape(role, *shape), dtype=scheme.dtype(role), device="meta") for role in scheme.roles
    }
    with Counted() as counted:
        fill_quantised(places, weight, scheme, dict.fromkeys(places, lambda tensor: tensor))
    assert 8 <= counted.count <= 40


def test_four_bits_are_stored_the_low_one_first():
    scheme = WeightScheme("int4", 3, torch.float32)
    tensors = {"values": torch.tensor([[0x18, 0x0F]], dtype=torch.uint8), "scales": torch.tensor([[0.5]])}
    assert stands_for(tensors, scheme, 3).tolist() == [[0.0, -3.5, 3.5]]
    zeros = torch.tensor([[1]], dtype=torch.uint8)
    assert stands_for(tensors | {"zeros": zeros}, scheme, 3).tolist() == [[3.5, 0.0, 7.0]]


def test_a_plain_weight_gets_a_scale_a_row_or_groups_of_128():
    assert quantised_as("fp8", 200) == WeightScheme("fp8", 200)
    assert quantised_as("int4", 200) == WeightScheme("int4", 128, torch.bfloat16)
    assert quantised_as("int4", 96).group == 96
