"""passes/sum_experts.py: the weighted sum of experts' rows becomes one op in pieces for many tokens."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from mllm_compile.passes.base import ANY_ROWS, VARIANTS
from mllm_compile.passes.match.nodes import is_op
from mllm_compile.passes.sum_experts import SumExperts
from tests.passes.support.every_graph import (
    Decoder,
    decoder_of_experts,
    decoder_of_experts_in_bfloat16,
    decoder_of_experts_with_biases,
    experts,
)
from tests.passes.support.graph_builder import run
from tests.passes.support.stand_ins import ALL, FOR_GPUS, stand_in_ops, streamed_ops_on_cpu

MAKERS = [decoder_of_experts, decoder_of_experts_in_bfloat16, decoder_of_experts_with_biases]


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu():
    with streamed_ops_on_cpu(), stand_in_ops(ALL):
        yield


def summed(gm: fx.GraphModule) -> tuple[fx.GraphModule, int]:
    """The graph with no other kernels than this and grouped products, which make the variants."""
    matches = 0
    for graph_pass in FOR_GPUS:
        if not graph_pass.needs or graph_pass.name in ("group_experts", SumExperts.name):
            result = graph_pass()(gm)
            gm, matches = result.gm, result.matches if graph_pass is SumExperts else matches
    gm.recompile()
    return gm, matches


def has_sum(piece) -> bool:
    return any(is_op(node, "sum_experts") for node in piece.graph.nodes)


@pytest.mark.parametrize("make", MAKERS)
def test_pieces_for_many_tokens_have_the_op_and_compute_what_was_traced(make):
    gm, matches = summed(make())
    assert matches > 0
    torch.testing.assert_close(run(gm, 7), run(make(), 7))
    variants = [variant for variants in gm.meta[VARIANTS].values() for variant in variants.values()]
    assert not any(has_sum(gm.get_submodule(variant)) for variant in variants), "Inductor's is as fast there"


def test_with_steps_of_any_number_of_rows_all_pieces_have_the_op():
    gm = decoder_of_experts()
    gm.meta[ANY_ROWS] = True
    gm, matches = summed(gm)
    assert matches > 0 and not gm.meta.get(VARIANTS)
    torch.testing.assert_close(run(gm, 7), run(decoder_of_experts(), 7))


def test_products_that_others_read_too_are_left_alone():
    def with_second_reader(decoder: Decoder, hidden: fx.Node, name: str) -> fx.Node:
        out = experts(decoder, hidden, name)
        product = [node for node in decoder.graph.nodes if any(user.target == "sum" for user in node.users)][-1]
        return decoder.call(torch.add, out, decoder.call(torch.mul, decoder.call(torch.amax, product), 0.1))

    assert summed(Decoder(dtype=torch.float32, feed_forward=with_second_reader).model())[1] == 0
