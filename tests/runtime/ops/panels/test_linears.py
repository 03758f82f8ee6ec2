"""The CPU's linears in C++: against float64, and a token's outputs whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.config.resolution.device import has_panels
from mllm_compile.runtime.ops.panels.layout import VALUES_UNIT, fits_panels, put_in_panels
from mllm_compile.runtime.ops.panels.ops import (
    integer_panel_linear_reference,
    panel_linear_reference,
    rounded_panel_linear_reference,
)
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4, SCALES, VALUES, WeightScheme, third_role
from tests.runtime.ops.panels.library import load_panel_linears

pytestmark = pytest.mark.skipif(not has_panels("cpu"), reason="the linears are for AVX2 and AVX-512")

TOKENS = (1, 2, 4, 9, 13, 30, 33, 53)  # all sizes of tiles, and enough for weights to become floats
SHAPES = [(48, 64), (16, 34), (160, 576)]  # an odd number of panels, inputs that fill no vector, several pairs
SCHEMES = {
    "int8": WeightScheme("int8", 576),
    "int8 in groups": WeightScheme("int8", 16),
    "int8 of Q8_0": WeightScheme("int8", 32, torch.float16),
    "int8 with offsets": WeightScheme("int8_offsets", 32, torch.float16),
    "int4": WeightScheme("int4", 64, torch.bfloat16),
    "int4 with zero points": WeightScheme("int4", 32, torch.float16, has_zeros=True),
    "int4 with offsets": WeightScheme("int4_offsets", 32, torch.float16),
    "int4 of Q4_K": WeightScheme("int4_offsets", 32, torch.float32),
    "mxfp4": MXFP4,
}


@pytest.fixture(autouse=True, scope="module")
def library():
    load_panel_linears()


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found.double() - right).norm() / right.norm()).item()


def in_panels(weight: torch.Tensor, unit: int = VALUES_UNIT) -> torch.Tensor:
    panels = weight.clone()
    put_in_panels(panels, unit)
    return panels


def integer_weight(scheme: WeightScheme, rows: int = 160, columns: int = 576):
    """The tensors in panels, and the weight that they stand for."""
    tensors = quantised(numbers(rows, columns, seed=1) * 0.02, scheme)
    third = tensors.get(third_role(scheme.kind))
    weight = dequantised(tensors, scheme.kind, scheme.group, columns, torch.float32)
    panels = [in_panels(tensors[VALUES]), in_panels(tensors[SCALES], tensors[SCALES].itemsize)]
    return (*panels, None if third is None else in_panels(third, third.itemsize)), weight


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_floats_are_those_of_float64(shape, dtype, bound):
    weight, bias = numbers(*shape, dtype=dtype, seed=1), numbers(shape[0], dtype=dtype, seed=2)
    for tokens in TOKENS:
        x = numbers(tokens, shape[1], dtype=dtype)
        for added in (None, bias):
            right = x.double() @ weight.double().T + (0 if added is None else added.double())
            found = torch.ops.mllm.panel_linear(x, in_panels(weight), added)
            assert found.dtype == dtype
            assert error(found, right) < bound
            assert error(found, panel_linear_reference(x, in_panels(weight), added).double()) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_integers_are_those_of_float64(name, dtype):
    scheme = SCHEMES[name]
    tensors, weight = integer_weight(scheme)
    bias = numbers(160, dtype=dtype, seed=2)
    for tokens in TOKENS:
        x = numbers(tokens, 576, dtype=dtype)
        right = x.double() @ weight.double().T + bias.double()
        found = torch.ops.mllm.integer_panel_linear(x, *tensors, bias, scheme.group)
        assert found.dtype == dtype
        assert error(found, right) < (2e-6 if dtype == torch.float32 else 5e-3)
        reference = integer_panel_linear_reference(x, *tensors, bias, scheme.group)
        assert error(found, reference.double()) < (2e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_integers_times_rounded_inputs_are_those_of_the_reference_and_near_float64(name, dtype):
    scheme = SCHEMES[name]
    tensors, weight = integer_weight(scheme)
    bias = numbers(160, dtype=dtype, seed=2)
    for tokens in TOKENS:
        x = numbers(tokens, 576, dtype=dtype)
        found = torch.ops.mllm.rounded_panel_linear(x, *tensors, bias, scheme.group)
        reference = rounded_panel_linear_reference(x, *tensors, bias, scheme.group)
        assert error(found, reference.double()) < (3e-4 if dtype == torch.float32 else 5e-3)
        assert error(found, x.double() @ weight.double().T + bias.double()) < 2e-2


@pytest.mark.parametrize("name", SCHEMES)
def test_a_rounded_token_gives_the_same_bits_alone_and_in_a_batch(name):
    scheme = SCHEMES[name]
    tensors, _ = integer_weight(scheme)
    x = numbers(13, 576)
    x[3] *= 20  # a scale for the batch would lose the others
    together = torch.ops.mllm.rounded_panel_linear(x, *tensors, None, scheme.group)
    for token in range(13):
        alone = torch.ops.mllm.rounded_panel_linear(x[token : token + 1], *tensors, None, scheme.group)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gives_the_same_bits_in_any_place_of_a_step(dtype):
    weight, row = in_panels(numbers(80, 576, dtype=dtype, seed=1)), numbers(1, 576, dtype=dtype)
    for tokens in (*range(2, 33), 48, 53, 66):
        found = torch.ops.mllm.panel_linear(row.repeat(tokens, 1), weight, None)
        assert torch.equal(found, found[:1].expand_as(found)), tokens


@pytest.mark.parametrize("name", SCHEMES)
def test_a_token_gives_the_same_bits_by_integers_in_any_place_of_a_step(name):
    scheme = SCHEMES[name]
    (tensors, _), row = integer_weight(scheme, rows=48), numbers(1, 576)
    for tokens in (*range(2, 9), 31, 32, 47):
        found = torch.ops.mllm.integer_panel_linear(row.repeat(tokens, 1), *tensors, None, scheme.group)
        assert torch.equal(found, found[:1].expand_as(found)), tokens


def test_inputs_may_be_parts_of_wider_rows_and_have_further_dimensions():
    weight = numbers(48, 64, seed=1)
    wide = numbers(5, 200)
    part = wide[:, 70:134]
    right = part @ weight.T
    assert torch.allclose(torch.ops.mllm.panel_linear(part, in_panels(weight), None), right, atol=1e-5)
    batch = part.contiguous()[None]
    assert torch.allclose(torch.ops.mllm.panel_linear(batch, in_panels(weight), None), right[None], atol=1e-5)
    columns = numbers(64, 5).T
    expected = columns @ weight.T
    assert torch.allclose(torch.ops.mllm.panel_linear(columns, in_panels(weight), None), expected, atol=1e-5)
    assert torch.ops.mllm.panel_linear(part[:0], in_panels(weight), None).shape == (0, 48)


@pytest.mark.parametrize("op", ["integer_panel_linear", "rounded_panel_linear"])
@pytest.mark.parametrize("name", ["int8", "int4 with offsets"])
def test_inputs_that_are_zero_or_no_numbers(name, op):
    tensors, _ = integer_weight(SCHEMES[name])
    x = numbers(3, 576)
    x[0], x[1, 5] = 0, float("nan")
    found = getattr(torch.ops.mllm, op)(x, *tensors, None, SCHEMES[name].group)
    assert torch.equal(found[0], torch.zeros(160))
    assert found[1].isnan().all()
    assert found[2].isfinite().all()


def test_threads_change_nothing():
    weight, x = in_panels(numbers(1024, 576, seed=1)), numbers(7, 576)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(torch.ops.mllm.panel_linear(x, weight, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("scheme", "rows", "columns", "fits"),
    [
        (WeightScheme("int8", 576), 192, 576, True),
        (WeightScheme("int8", 576), 200, 576, False),
        (WeightScheme("int4", 128), 192, 576, False),
        (WeightScheme("int4", 64), 192, 576, True),
        (WeightScheme("int4", 12), 192, 576, False),
        (WeightScheme("int4_lanes", 128), 192, 512, False),
        (WeightScheme("fp8", 576), 192, 576, False),
        (MXFP4, 192, 576, True),
    ],
)
def test_which_weights_lie_in_panels(scheme, rows, columns, fits):
    assert fits_panels(scheme, rows, columns) is fits
