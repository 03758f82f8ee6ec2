"""dequantise_weights: which weights a piece dequantises itself, and that the numbers are the op's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from mllm_compile.compiler.program_builder import build_program
from mllm_compile.passes.base import NO_CUDA_COMPILER, VARIANTS, WEIGHT_SCHEMES, PassTarget, WeightSchemes
from mllm_compile.passes.dequantise_weights import DequantiseWeights
from mllm_compile.passes.match.nodes import LINEAR, called_pieces, is_call, is_op
from mllm_compile.passes.pipeline import passes_left_out
from mllm_compile.passes.variants import add_variants, copy_of
from mllm_compile.runtime.quantised.scheme import MXFP4, NVFP4, WeightScheme
from tests.passes.support.every_graph import Decoder
from tests.passes.support.graph_builder import run
from tests.passes.support.stand_ins import FOR_GPUS, INTEGERS, stand_in_ops

SCHEMES = {
    "fp8 rows": WeightScheme("fp8", 256),
    "fp8 groups": WeightScheme("fp8", 128),
    "int4": WeightScheme("int4", 64, torch.bfloat16),
    "int4 with zero points": WeightScheme("int4", 128, torch.float16, has_zeros=True),
    "int4 in lanes": WeightScheme("int4_lanes", 128, torch.bfloat16),
    "int4 in lanes with zero points": WeightScheme("int4_lanes", 128, torch.float16, has_zeros=True),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}


@pytest.fixture
def ops_on_cpu() -> Iterator[None]:
    with stand_in_ops(INTEGERS):
        yield


def pieces_of(scheme: WeightScheme) -> fx.GraphModule:
    """A decoder in pieces, whose gates and ups have the scheme."""
    gm = Decoder().model()
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes(
        {f"layers.{n}.{part}.weight": scheme for n in (0, 1) for part in ("gate", "up")}
    )
    for graph_pass in FOR_GPUS:
        if not graph_pass.needs:
            gm = graph_pass()(gm).gm
    gm.recompile()
    return gm


def nodes_of(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    return list(gm.get_submodule(name).graph.nodes)


@pytest.mark.usefixtures("ops_on_cpu")
@pytest.mark.parametrize("name", SCHEMES)
def test_a_piece_dequantises_its_weight_to_the_same_numbers(name):
    gm = pieces_of(SCHEMES[name])
    expected, weights = run(gm), build_program(gm).quantised_weights
    result = DequantiseWeights()(gm)
    gm.recompile()
    assert result.matches == 2, "of a layer in the middle, and of the last"
    nodes = [node for piece in called_pieces(gm) for node in nodes_of(gm, piece)]
    assert not any(is_op(node, "quantised_linear") for node in nodes)
    assert torch.equal(run(gm), expected)
    assert build_program(gm).quantised_weights == weights and len(weights) == 2


def test_variants_for_few_tokens_do_too():
    gm = pieces_of(SCHEMES["fp8 rows"])
    assert add_variants(gm, 16, "_variant", copy_of)
    DequantiseWeights()(gm)
    variants = [variant for variants in gm.meta[VARIANTS].values() for variant in variants.values()]
    assert not any(is_op(node, "quantised_linear") for variant in variants for node in nodes_of(gm, variant))


def test_groups_that_do_not_divide_the_inputs_are_left_to_the_op():
    gm = pieces_of(WeightScheme("fp8", 96))
    assert DequantiseWeights()(gm).matches == 0
    nodes = [node for piece in called_pieces(gm) for node in nodes_of(gm, piece)]
    assert sum(is_op(node, "quantised_linear") for node in nodes) == 2
    assert any(is_call(node, LINEAR) for node in nodes)


def test_other_gpus_keep_the_op():
    hopper, other = (PassTarget("cuda", True, cuda, cuda, "bfloat16", "bfloat16") for cuda in (True, False))
    assert "dequantise_weights" not in passes_left_out(hopper)
    assert passes_left_out(other)["dequantise_weights"] == NO_CUDA_COMPILER
