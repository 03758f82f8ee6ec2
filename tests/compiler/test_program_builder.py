"""compiler/program_builder.py: what a program says of experts' weights, whichever ops multiply with them; and which
layers with a state have operands that pieces make of weights."""

from __future__ import annotations

import operator

import pytest
import torch

from mllm_compile.bench.limits.step_parts import WeightSize, step_parts
from mllm_compile.compiler.pieces import layers_with_made_constants
from mllm_compile.compiler.program_builder import build_program, weight_shapes
from mllm_compile.passes.match.nodes import called_pieces, is_op
from mllm_compile.passes.pipeline import PASSES
from mllm_compile.runtime.program.spec import ExpertWeight, Program
from tests.passes.support.every_graph import (
    CHOSEN,
    EXPERT_FFN,
    EXPERTS,
    decoder_of_experts_in_bfloat16,
    decoder_of_experts_with_biases,
)
from tests.passes.support.graph_builder import HEAD_DIM, HEADS, GraphBuilder
from tests.passes.support.stand_ins import ALL, stand_in_ops, streamed_ops_on_cpu

HIDDEN = 256
STAGES = {
    "as traced": ((), "expert_linear"),
    "grouped": (("group_experts",), "grouped_linear"),
    "tiled": (("group_experts", "tile_experts"), "expert_tiles"),
}


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu():
    with streamed_ops_on_cpu(), stand_in_ops(ALL):
        yield


def lowered(make, passes, op_name):
    """The graph after the passes of every device and these; one piece calls the op."""
    gm = make()
    for graph_pass in PASSES:
        if not graph_pass.needs or graph_pass.name in passes:
            gm = graph_pass()(gm).gm
    nodes = [node for name in called_pieces(gm) for node in gm.get_submodule(name).graph.nodes]
    assert any(is_op(node, op_name) for node in nodes)
    return gm


@pytest.mark.parametrize("stage", STAGES)
def test_a_program_knows_its_experts_weights_whichever_ops_read_them(stage):
    program = build_program(lowered(decoder_of_experts_in_bfloat16, *STAGES[stage]))
    up = ExpertWeight(EXPERTS, CHOSEN, HIDDEN, 2 * EXPERT_FFN, of_tokens=True)
    down = ExpertWeight(EXPERTS, CHOSEN, EXPERT_FFN, HIDDEN, of_tokens=False)
    of_layer = {"up": up, "down": down}
    expected = {f"layers.{layer}.experts.{part}": of_layer[part] for layer in (0, 1) for part in of_layer}
    assert program.expert_weights == expected
    assert Program.from_json(program.to_json()).expert_weights == expected


@pytest.mark.parametrize("stage", ["as traced", "grouped"])
def test_transposed_weights_have_their_inputs_first(stage):
    program = build_program(lowered(decoder_of_experts_with_biases, *STAGES[stage]))
    up, down = (program.expert_weights[f"layers.0.experts.{part}"] for part in ("up", "down"))
    assert (up.inputs, up.outputs, up.of_tokens) == (HIDDEN, 2 * EXPERT_FFN, True)
    assert (down.inputs, down.outputs, down.of_tokens) == (EXPERT_FFN, HIDDEN, False)


@pytest.mark.parametrize("stage", STAGES)
def test_a_decode_of_one_request_reads_the_experts_that_it_chose(stage):
    gm = lowered(decoder_of_experts_in_bfloat16, *STAGES[stage])
    weights = {name: WeightSize(*one) for name, one in weight_shapes(gm).items()}
    alone, many = (step_parts(build_program(gm), weights, torch.bfloat16, batch, 8) for batch in (1, 4096))
    fewer = sum(part.weight_bytes for part in many) - sum(part.weight_bytes for part in alone)
    an_expert = 3 * EXPERT_FFN * HIDDEN * 2
    assert fewer == 2 * (EXPERTS - CHOSEN) * an_expert
    assert sum(part.flops for part in many) == 4096 * sum(part.flops for part in alone)


@pytest.mark.parametrize(
    ("rates", "is_made"),
    [
        (lambda builder, weight: builder.weight("A1", HEADS), False),
        (lambda builder, weight: builder.method("squeeze", weight, 1), False),
        (lambda builder, weight: builder.call(operator.getitem, weight, (slice(None), 0)), False),
        (lambda builder, weight: builder.call(operator.neg, builder.method("squeeze", weight, 1)), True),
        (lambda builder, weight: builder.method("to", builder.method("squeeze", weight, 1), torch.float64), True),
    ],
    ids=["a weight", "a view", "a column", "negated", "another type"],
)
def test_a_layer_with_a_state_whose_rates_a_piece_makes_is_known(rates, is_made):
    """Of a weight as it is stored, and of a view of one, a kernel may read before the piece ahead has ended."""
    builder = GraphBuilder()
    x = builder.embed()
    heads = builder.method("view", x, builder.size_inputs["T"], HEADS, HEAD_DIM)
    numbers = builder.call(torch.unsqueeze, builder.linear(x, "numbers", 3), 1)
    weight = builder.weight("A", HEADS, 1)
    given = heads, builder.linear(x, "dt", HEADS), rates(builder, weight), numbers, numbers, *[None] * 4
    out = builder.call(torch.ops.mllm.ssd.default, *given, True, 0.0, None, False, 0.0, 1, "")
    gm = builder.canonical(builder.head(builder.method("flatten", out, 1)))
    for graph_pass in PASSES:
        if not graph_pass.needs:
            gm = graph_pass()(gm).gm
    layers = build_program(gm).state_layers
    assert len(layers) == 1 and layers_with_made_constants(gm, layers) == {layer.name for layer in layers if is_made}
