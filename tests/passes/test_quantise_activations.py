"""quantise_activations: which linears multiply in fp8, and by how much that is off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from mllm_compile.passes import quantise_activations
from mllm_compile.passes.base import NO_CUDA_COMPILER, RANKS, VARIANTS, WEIGHT_SCHEMES, PassTarget, WeightSchemes
from mllm_compile.passes.fuse_silu_mul import FuseSiluMul
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import called_pieces, is_op
from mllm_compile.passes.pipeline import passes_left_out
from mllm_compile.passes.quantise_activations import QuantiseActivations
from mllm_compile.passes.variants import add_variants, copy_of
from mllm_compile.runtime.ops import family, op
from mllm_compile.runtime.ops.scaled_linear.kernel import scaled_kernels
from mllm_compile.runtime.quantised.scheme import WeightScheme
from tests.passes.support.every_graph import Decoder
from tests.passes.support.graph_builder import run
from tests.passes.support.stand_ins import FOR_GPUS, SILU_MUL, stand_in_ops

ROWS, GROUPS = WeightScheme("fp8", 256), WeightScheme("fp8", 128)


def pieces_of(
    scheme: WeightScheme,
    dtype: torch.dtype = torch.bfloat16,
    names: tuple[str, ...] = ("gate", "up"),
    num_ranks: int = 1,
    of_down: WeightScheme | None = None,
) -> fx.GraphModule:
    """A decoder in pieces, whose gates and ups, or others, have the scheme, and its downs another."""
    gm = Decoder(dtype=dtype).model()
    gm.meta[RANKS] = num_ranks
    schemes = dict.fromkeys(names, scheme) | ({} if of_down is None else {"down": of_down})
    of_layers = {f"layers.{n}.{part}.weight": one for n in (0, 1) for part, one in schemes.items()}
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes(of_layers)
    for graph_pass in FOR_GPUS:
        if not graph_pass.needs:
            gm = graph_pass()(gm).gm
    gm.recompile()
    return gm


def calls(gm: fx.GraphModule, name: str, op_name: str) -> int:
    return sum(is_op(node, op_name) for node in gm.get_submodule(name).graph.nodes)


def test_variants_for_more_tokens_than_kernels_of_few_are_for_multiply_in_fp8_too():
    gm = pieces_of(ROWS)
    add_variants(gm, 64, "_few", copy_of)
    add_variants(gm, 256, "_more", copy_of)
    assert QuantiseActivations()(gm).matches == 4, "in two pieces, and in a variant of each"
    for variants in gm.meta[VARIANTS].values():
        assert not calls(gm, variants[64], "scaled_linear") and not calls(gm, variants[256], "quantised_linear")
    assert sum(calls(gm, variants[64], "quantised_linear") for variants in gm.meta[VARIANTS].values()) == 2


@pytest.mark.parametrize("scheme", [ROWS, GROUPS])
def test_an_fp8_weight_is_multiplied_by_fp8_inputs(scheme):
    gm = pieces_of(scheme)
    expected = run(gm)
    assert QuantiseActivations()(gm).matches == 2, "of a layer in the middle, and of the last"
    gm.recompile()
    assert sum(calls(gm, name, "scaled_linear") for name in called_pieces(gm)) == 2
    assert not any(calls(gm, name, "quantised_linear") for name in called_pieces(gm))
    error = (run(gm) - expected).norm() / expected.norm()
    assert 1e-4 < error < 5e-2, "it is rounded, and no more"


@pytest.mark.parametrize(
    ("scheme", "name", "num_ranks", "shape"),
    [
        (ROWS, "gate", 4, (128, 256)),
        (WeightScheme("fp8", 512), "down", 2, (256, 256)),
        (GROUPS, "down", 2, None),
        (GROUPS, "down", 4, (256, 128)),  # of a quarter a row has one scale left
    ],
)
def test_a_program_has_the_kernels_of_a_rank_s_weights(scheme, name, num_ranks, shape):
    gm = pieces_of(scheme, names=(name,), num_ranks=num_ranks)
    assert QuantiseActivations()(gm).matches == 2
    called = [(gm.get_submodule(piece), None) for piece in called_pieces(gm)]
    assert family("scaled_linear").wanted(called) == (() if shape is None else scaled_kernels(*shape))


@pytest.mark.parametrize("scheme", [WeightScheme("fp8", 512), GROUPS])
def test_behind_an_activation_one_kernel_makes_inputs_and_scales(scheme, monkeypatch):
    monkeypatch.setattr(nodes, "KERNEL_DTYPES", (torch.bfloat16,))
    with stand_in_ops(SILU_MUL):
        gm = pieces_of(scheme, names=("down",))
        expected = run(gm)
        assert FuseSiluMul()(gm).matches == QuantiseActivations()(gm).matches == 2
        gm.recompile()
        pieces = called_pieces(gm)
        assert sum(calls(gm, name, "silu_mul_in_fp8") for name in pieces) == 2
        assert not any(calls(gm, name, "silu_mul") for name in pieces)
        error = (run(gm) - expected).norm() / expected.norm()
    assert 1e-4 < error < 5e-2, "it is rounded, and no more"


def test_variants_for_few_tokens_multiply_as_before():
    gm = pieces_of(ROWS)
    assert add_variants(gm, 16, "_variant", copy_of)
    QuantiseActivations()(gm)
    variants = [variant for variants in gm.meta[VARIANTS].values() for variant in variants.values()]
    assert sum(calls(gm, variant, "quantised_linear") for variant in variants) == 2
    assert not any(calls(gm, variant, "scaled_linear") for variant in variants)


@pytest.mark.parametrize(
    ("scheme", "size", "least", "expected"),
    [
        (ROWS, 64, 1, {32}),
        (ROWS, 64, 2 * 512 * 256, {32}),
        (ROWS, 64, 2 * 512 * 256 + 1, {64}),
        (ROWS, 128, 1, {128}),
        (GROUPS, 64, 1, {64}),
        (WeightScheme("int4", 128, torch.bfloat16), 64, 1, {64}),
    ],
)
def test_a_variant_is_shorter_where_kernels_of_our_own_multiply_many_weights_in_fp8(
    scheme, size, least, expected, monkeypatch
):
    monkeypatch.setattr(quantise_activations, "_LEAST_WEIGHTS", least)
    gm = pieces_of(scheme)
    quantised = [name for name in called_pieces(gm) if calls(gm, name, "quantised_linear")]
    assert quantised
    add_variants(gm, size, "_variant", copy_of)
    QuantiseActivations()(gm)
    for name, variants in gm.meta[VARIANTS].items():
        assert set(variants) == (expected if name in quantised else {size})
        assert calls(gm, variants[max(variants)], "quantised_linear") == (name in quantised and size <= 64)


@pytest.mark.parametrize(
    ("of_down", "expected"),
    [
        (WeightScheme("fp8", 512), {32}),
        (GROUPS, {64}),
        (WeightScheme("int4", 128, torch.bfloat16), {64}),  # which larger steps than the variant's would dequantise
    ],
)
def test_a_variant_stays_for_what_reads_weights_in_four_bits_beside_those_in_fp8(of_down, expected, monkeypatch):
    monkeypatch.setattr(quantise_activations, "_LEAST_WEIGHTS", 1)
    gm = pieces_of(ROWS, of_down=of_down)
    add_variants(gm, 64, "_variant", copy_of)
    QuantiseActivations()(gm)
    of_both = [name for name in called_pieces(gm) if calls(gm, name, "scaled_linear")]
    assert len(of_both) == 2
    assert all(set(gm.meta[VARIANTS][name]) == expected for name in of_both)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        (WeightScheme("fp8", 64), torch.bfloat16),
        (WeightScheme("int4", 128, torch.bfloat16), torch.bfloat16),
        (replace(ROWS, scale_dtype=torch.bfloat16), torch.bfloat16),
        (ROWS, torch.float16),
        (ROWS, torch.float32),
    ],
)
def test_other_weights_and_dtypes_are_left_alone(scheme, dtype):
    assert QuantiseActivations()(pieces_of(scheme, dtype)).matches == 0


def test_deterministic_runtimes_and_other_gpus_do_without():
    hopper = PassTarget("cuda", True, True, True, "bfloat16", "bfloat16")
    assert "quantise_activations" not in passes_left_out(hopper)
    assert passes_left_out(replace(hopper, compiles_cuda=False))["quantise_activations"] == NO_CUDA_COMPILER
    assert "deterministic" in passes_left_out(replace(hopper, deterministic=True))["quantise_activations"]


@pytest.mark.parametrize("groups", [1, 2])
def test_the_op_multiplies_what_its_operands_stand_for(groups):
    generator = torch.Generator().manual_seed(0)
    x, values = (torch.randn(n, 256, generator=generator).to(torch.float8_e4m3fn) for n in (5, 32))
    x_scales, scales = (torch.rand(n, groups, generator=generator) for n in (5, 32))
    of_inputs = [one.double().repeat_interleave(256 // groups, 1) for one in (x_scales, scales)]
    exact = (x.double() * of_inputs[0]) @ (values.double() * of_inputs[1]).t()
    ours = op("scaled_linear")(x, x_scales, values, scales)
    assert ours.dtype == torch.bfloat16
    assert ((ours - exact).norm() / exact.norm()).item() < 4e-3
