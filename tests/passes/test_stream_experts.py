"""passes/stream_experts.py: experts of up to 8 tokens, with choice, sum, residual and norms, in two calls."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional

from mllm_compile.kernels.cuda import kernels_of
from mllm_compile.passes.base import VARIANTS, PassTarget
from mllm_compile.passes.choose_experts import ChooseExperts
from mllm_compile.passes.count_experts import CountExperts
from mllm_compile.passes.group_experts import GroupExperts
from mllm_compile.passes.match.nodes import is_op
from mllm_compile.passes.stream_experts import StreamExperts
from mllm_compile.passes.stream_linears import StreamLinears
from mllm_compile.runtime.ops.experts.shapes import NO_SOFTMAX, SOFTMAX_OF_ALL
from mllm_compile.runtime.ops.stream_experts.kernel import DownKernel, GateUpKernel
from mllm_compile.runtime.ops.stream_experts.shapes import MAX_TOKENS, ROWS, is_taken
from mllm_compile.runtime.program.spec import PieceVariant, Program
from tests.passes.support.every_graph import Decoder, decoder_of_experts_with_biases
from tests.passes.support.graph_builder import run
from tests.passes.support.stand_ins import ALL, FOR_GPUS, stand_in_ops, streamed_ops_on_cpu
from tests.passes.test_every_pass import variants_for

EXPERTS, CHOSEN, FFN = 64, 4, 64


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu():
    with streamed_ops_on_cpu(), stand_in_ops(ALL):
        yield


def own_weights(decoder: Decoder, scores: fx.Node) -> tuple[fx.Node, fx.Node]:
    """As Qwen's: softmax in float32, choice, renormalisation, rounded."""
    chosen = decoder.call(
        torch.topk, decoder.call(functional.softmax, scores, dim=-1, dtype=torch.float32), CHOSEN, dim=-1
    )
    weights, ids = (decoder.call(operator.getitem, chosen, index) for index in (0, 1))
    weights = decoder.call(operator.truediv, weights, decoder.method("sum", weights, dim=-1, keepdim=True))
    return decoder.method("to", weights, torch.bfloat16), ids


def wide_weights(decoder: Decoder, scores: fx.Node) -> tuple[fx.Node, fx.Node]:
    """As Mixtral's: the softmax is of scores in float32, and weights stay so."""
    chosen = decoder.call(
        torch.topk, decoder.call(functional.softmax, decoder.method("float", scores), dim=-1), CHOSEN, dim=-1
    )
    weights, ids = (decoder.call(operator.getitem, chosen, index) for index in (0, 1))
    return weights, ids


def other_weights(decoder: Decoder, scores: fx.Node) -> tuple[fx.Node, fx.Node]:
    """As DeepSeek's: the choice is of sums with a bias, the weights are without it, and scaled."""
    scores = decoder.call(torch.sigmoid, decoder.method("float", scores))
    bias = decoder.weight(f"bias.{len(decoder.graph.nodes)}", EXPERTS)
    chosen = decoder.call(torch.topk, decoder.call(operator.add, scores, bias), CHOSEN, dim=-1)
    ids = decoder.call(operator.getitem, chosen, 1)
    return decoder.call(operator.mul, decoder.call(torch.gather, scores, 1, ids), 2.5), ids


def experts(weighted: Callable[..., Any], decoder: Decoder, hidden: fx.Node, name: str) -> fx.Node:
    call, method, weight = decoder.call, decoder.method, decoder.weight
    flat = method("view", hidden, -1, decoder.hidden)
    weights, ids = weighted(
        decoder, decoder.projection(method("reshape", flat, -1, decoder.hidden), f"{name}.r", EXPERTS)
    )
    up = weight(f"{name}.experts.up", EXPERTS, 2 * FFN, decoder.hidden, dtype=decoder.dtype)
    down = weight(f"{name}.experts.down", EXPERTS, decoder.hidden, FFN, dtype=decoder.dtype)
    parts = call(torch.chunk, call(torch.ops.mllm.expert_linear, flat, ids, up, None, False, True), 2, -1)
    gate, right = (call(operator.getitem, parts, index) for index in (0, 1))
    active = call(operator.mul, call(functional.silu, gate), right)
    outputs = call(torch.ops.mllm.expert_linear, active, ids, down, None, False, False)
    weighted_rows = call(operator.mul, outputs, method("reshape", weights, -1, 1))
    tokens = decoder.size_inputs["T"]
    total = method("sum", method("view", weighted_rows, tokens, CHOSEN, -1), dim=1)
    return method("reshape", method("to", total, decoder.dtype), 1, tokens, decoder.hidden)


def decoder_with(weighted: Callable[..., Any]) -> fx.GraphModule:
    return Decoder(feed_forward=partial(experts, weighted)).model()


def rewritten(make: Callable[[], fx.GraphModule], *passes: type) -> fx.GraphModule:
    gm = make()
    for graph_pass in FOR_GPUS:
        if (not graph_pass.needs and graph_pass is not CountExperts) or graph_pass in passes:
            gm = graph_pass()(gm).gm
    gm.recompile()
    return gm


def streamed(weighted: Callable[..., Any], *more: type) -> fx.GraphModule:
    return rewritten(partial(decoder_with, weighted), ChooseExperts, StreamExperts, StreamLinears, GroupExperts, *more)


def variants_of_experts(gm: fx.GraphModule) -> list[Any]:
    return [gm.get_submodule(variants[MAX_TOKENS]) for variants in gm.meta[VARIANTS].values() if MAX_TOKENS in variants]


def calls(piece: Any, name: str) -> list[Any]:
    return [node.args for node in piece.graph.nodes if is_op(node, name)]


def test_a_layer_of_experts_is_five_calls():
    gm = streamed(own_weights)
    middle, last = variants_of_experts(gm)
    ops = [str(node.target).split(".")[1] for node in middle.graph.nodes if str(node.target).startswith("mllm.")]
    assert ops == [
        "stream_linear_residual_norm",
        "stream_linear",
        "stream_expert_up",
        "stream_expert_down_norm",
        "stream_linear",
    ]
    (up,), (down,) = calls(middle, "stream_expert_up"), calls(middle, "stream_expert_down_norm")
    assert (up[3], up[7:], up[5]) == (1e-6, (CHOSEN, SOFTMAX_OF_ALL, True, False), None), "of scores, under the norm"
    assert down[5:] == up[4:], "both find the same choice"
    assert len(calls(last, "stream_expert_down")) == 1, "no linear of ours reads the last norm"


@pytest.mark.parametrize(
    ("weighted", "how"),
    [
        (own_weights, (CHOSEN, SOFTMAX_OF_ALL, True, False)),
        (wide_weights, (CHOSEN, SOFTMAX_OF_ALL, False, True)),
        (other_weights, (CHOSEN, NO_SOFTMAX, False, True)),
    ],
)
@pytest.mark.parametrize("tokens", [1, 7, 8])
def test_the_variant_computes_what_was_traced(weighted, how, tokens):
    gm = streamed(weighted)
    (up,) = calls(variants_of_experts(gm)[0], "stream_expert_up")
    assert up[7:] == how and (up[5] is not None) == (weighted is other_weights), "weights of its own are given"
    traced = run(decoder_with(weighted), tokens)
    with variants_for(gm, tokens):
        errors = (run(gm, tokens) - traced).norm(dim=-1) / traced.norm(dim=-1)
    # Of two experts whose scores are a rounding apart, one token may choose the other: processors round differently.
    assert (errors < 3e-2).sum() >= max(1, errors.numel() - 1), errors


def test_scores_are_read_as_the_linear_gave_them():
    (up,) = calls(variants_of_experts(streamed(wide_weights))[0], "stream_expert_up")
    assert up[4].meta["val"].dtype == torch.bfloat16


def test_what_is_counted_is_given():
    gm = streamed(own_weights, CountExperts)
    for variant in variants_of_experts(gm):
        ((_, _, _, _, ids, weights, *_),) = calls(variant, "stream_expert_up")
        assert is_op(ids, "count_experts") and weights is not None


def test_other_variants_for_few_tokens_are_not_made_and_those_for_more_are():
    gm = streamed(own_weights)
    of_experts = [variants for variants in gm.meta[VARIANTS].values() if MAX_TOKENS in variants]
    assert [sorted(variants) for variants in of_experts] == [[8, 64, 256]] * 2
    for variants in of_experts:
        assert not calls(gm.get_submodule(variants[64]), "stream_expert_up")


def test_experts_that_no_kernel_takes_have_no_such_variant():
    gm = rewritten(decoder_of_experts_with_biases, ChooseExperts, StreamExperts)
    assert gm.meta[VARIANTS] == {}
    gm = rewritten(partial(decoder_with, own_weights), StreamExperts)
    assert gm.meta[VARIANTS] == {}, "nothing says that a token's choices differ"


def test_the_sum_that_something_else_reads_stays_apart():
    def read_twice(decoder: Decoder, hidden: fx.Node, name: str) -> fx.Node:
        total = experts(own_weights, decoder, hidden, name)
        return decoder.call(operator.mul, total, decoder.call(torch.sigmoid, total))

    make = partial(Decoder(feed_forward=read_twice).model)
    assert rewritten(make, ChooseExperts, StreamExperts).meta[VARIANTS] == {}


def test_the_kernels_that_variants_call_are_named():
    gm = streamed(own_weights)
    variants = {
        piece: tuple(PieceVariant(variant, 0, 1, most) for most, variant in of_piece.items())
        for piece, of_piece in gm.meta[VARIANTS].items()
    }
    kernels = kernels_of(gm, Program((), (), (), "logits", variants))["stream_experts"]
    hidden = Decoder.hidden
    assert [(type(kernel), kernel.rows, kernel.columns) for kernel in kernels] == [
        (GateUpKernel, 2 * FFN, hidden),
        (DownKernel, hidden, FFN),
        (DownKernel, hidden, FFN),
    ]
    assert {kernel.next_blocks for kernel in kernels[1:]} == {0, hidden // ROWS}
    assert len({kernel.name for kernel in kernels}) == 3


def test_a_gpu_without_the_kernels_does_without():
    target = PassTarget("cuda", True, False, True, "bfloat16", "bfloat16")
    assert "CUDA C++" in (StreamExperts.obstacle(target) or "")


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ((128, 8, 2048, 768, 2048), True),
        ((512, 10, 4096, 512, 4096), True),
        ((8, 2, 4096, 14336, 4096), False),
        ((128, 8, 2880, 768, 2880), False),
        ((2048, 8, 2048, 768, 2048), False),
    ],
)
def test_shapes_that_are_taken(shape, taken):
    assert is_taken(*shape) is taken
