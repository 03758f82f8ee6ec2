"""All passes over a graph that is cut over ranks: the numbers of both ranks are the whole graph's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx

from mllm_compile.passes.base import QUANTISED_TENSORS, RANKS, WEIGHT_CUTS, WEIGHT_SCHEMES, WeightSchemes
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import is_op
from mllm_compile.passes.pipeline import run_passes
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from mllm_compile.runtime.quantised.scheme import WeightScheme, quantised_as
from tests.passes.support.every_graph import (
    decoder_of_experts,
    decoder_of_experts_with_biases,
    decoder_with_normed_heads,
)
from tests.passes.support.graph_builder import run
from tests.passes.support.stand_ins import ALL, stand_in_ops, streamed_ops_on_cpu
from tests.passes.test_every_pass import variants_for

NUM_RANKS = 2
Graph = Callable[[], fx.GraphModule]


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu() -> Iterator[None]:
    with streamed_ops_on_cpu(), stand_in_ops(ALL), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "KERNEL_DTYPES", (torch.bfloat16, torch.float16, torch.float32))
        yield


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize(
    ("graph", "tolerance"),
    [(decoder_with_normed_heads, 0.05), (decoder_of_experts, 1e-4), (decoder_of_experts_with_biases, 1e-4)],
    ids=["bfloat16", "experts", "experts with biases"],
)
def test_two_ranks_compute_what_one_does_behind_all_passes(graph: Graph, tolerance: float, num_tokens: int):
    whole, cut = run(graph(), num_tokens), rewritten(graph, NUM_RANKS)
    assert len(cut.meta[WEIGHT_CUTS]) > 10
    with variants_for(cut, num_tokens):
        found = run_lockstep(NUM_RANKS, lambda rank: run(cut, num_tokens))
    for logits in found:
        torch.testing.assert_close(logits, whole, rtol=tolerance, atol=tolerance * float(whole.abs().max()))
    pieces = [module for _, module in cut.named_children() if isinstance(module, fx.GraphModule)]
    nodes_of_pieces = [node for piece in pieces for node in piece.graph.nodes]
    assert any(is_op(node, "all_reduce", "all_reduce_residual_norm") for node in nodes_of_pieces)
    assert has_rope_kernels(cut) == has_rope_kernels(rewritten(graph, 1))


@cache
def rewritten(graph: Graph, num_ranks: int) -> fx.GraphModule:
    """The graph after the passes for so many ranks."""
    gm = graph()
    gm.meta[RANKS] = num_ranks
    return run_passes(gm)[0]


def has_rope_kernels(gm: fx.GraphModule) -> bool:
    """True if rotation and the write into the cache are a kernel, as they are where the graph is spelled as traced."""
    pieces = [module for _, module in gm.named_children() if isinstance(module, fx.GraphModule)]
    return any(is_op(node, "rope_and_cache") for piece in pieces for node in piece.graph.nodes)


SCHEMES = {
    "fp8, a scale a row": quantised_as("fp8", 1 << 20),
    "fp8 in groups": WeightScheme("fp8", 16),
    "four bits in groups": WeightScheme("int4", 8, torch.float32, has_zeros=True),
    "four bits, a scale a row": WeightScheme("int4", 1 << 20, torch.float32),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_in_few_bits_are_cut_with_their_scales(name: str):
    gm, scheme = decoder_with_normed_heads(), SCHEMES[name]
    weights = {node.meta["weight_name"]: node.meta["val"] for node in gm.graph.nodes if "weight_name" in node.meta}
    schemes = {
        weight: replace(scheme, group=min(scheme.group, int(val.shape[1])))
        for weight, val in weights.items()
        if val.dim() == 2 and "layers" in weight
    }
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes(schemes)
    whole = run(gm)
    gm.meta[RANKS] = NUM_RANKS
    gm, _ = run_passes(gm)
    quantised = {tensor.weight_name for tensor in gm.meta[QUANTISED_TENSORS].values()}
    assert quantised == set(schemes)
    assert len(quantised) > 5
    assert quantised <= set(gm.meta[WEIGHT_CUTS])
    for logits in run_lockstep(NUM_RANKS, lambda rank: run(gm)):
        torch.testing.assert_close(logits, whole, rtol=0.05, atol=0.05 * float(whole.abs().max()))
