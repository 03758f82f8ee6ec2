"""All passes over a graph that is cut over ranks: the numbers of both ranks are the whole graph's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx

from mllm_compile.passes.base import RANKS, WEIGHT_CUTS
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import is_op
from mllm_compile.passes.pipeline import run_passes
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from tests.passes.support.graph_builder import run
from tests.passes.support.stand_ins import ALL, stand_in_ops, streamed_ops_on_cpu
from tests.passes.test_every_pass import (
    decoder_of_experts,
    decoder_of_experts_with_biases,
    decoder_with_normed_heads,
    forms_for,
)

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
    whole = run(graph(), num_tokens)
    cut = graph()
    cut.meta[RANKS] = NUM_RANKS
    cut, _ = run_passes(cut)
    assert len(cut.meta[WEIGHT_CUTS]) > 10
    with forms_for(cut, num_tokens):
        found = run_lockstep(NUM_RANKS, lambda rank: run(cut, num_tokens))
    for logits in found:
        torch.testing.assert_close(logits, whole, rtol=tolerance, atol=tolerance * float(whole.abs().max()))
    pieces = [module for _, module in cut.named_children() if isinstance(module, fx.GraphModule)]
    assert any(is_op(node, "all_reduce") for piece in pieces for node in piece.graph.nodes)
