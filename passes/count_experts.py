"""Puts a counter behind each layer's choice of experts."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from mllm_compile.passes.base import EXPERT_RANKS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.experts import match_expert_linear
from mllm_compile.passes.match.nodes import called_pieces, is_op
from mllm_compile.passes.spread_experts import chosen_of_all
from mllm_compile.passes.token_slots import give_slots, slots_in
from mllm_compile.runtime.ops import op


class CountExperts(GraphPass):
    """Shows the choice of experts to what counts and keeps it: `Engine.stats().experts`, `return_routed_experts`.

    Why: which experts are chosen, and how unevenly, is known on the device alone.

    Before::

        h = mllm.expert_linear(x, ids, gate_up, …); …; y = mllm.expert_linear(a, ids, down, …)

    After::

        counted = mllm.count_experts(ids, slots)
        h = mllm.expert_linear(x, counted, gate_up, …); …; y = mllm.expert_linear(a, counted, down, …)

    Where experts are spread over ranks, the choice among all of them is counted, of all ranks' tokens: every rank makes
    it, so each has the counts of all.

    Requires: deduplicated pieces, before variants are made of them. Left out unless a config asks for it.
    Preserves: every number.
    """

    name: ClassVar[str] = "count_experts"
    is_required: ClassVar[bool] = True  # a config asks for it by a key of its own

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return None if target.counts_experts else "neither runtime.expert_stats nor routed_experts is set"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = 0
        for name in called_pieces(gm):
            piece: Any = gm.get_submodule(name)
            linears: list[Any] = [node for node in piece.graph.nodes if match_expert_linear(node)]
            for own in dict.fromkeys(node.args[1] for node in linears):
                ids = chosen_of_all(own)
                if is_op(own if ids is None else ids, "count_experts"):
                    continue
                num_ranks = 1 if ids is None else gm.meta[EXPERT_RANKS]
                give_slots(gm, name, num_ranks)
                _count(piece.graph, own if ids is None else ids, num_ranks)
                matches += 1
            piece.recompile()
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _count(graph: fx.Graph, ids: fx.Node, num_ranks: int) -> None:
    readers = list(ids.users) if num_ranks > 1 else [node for node in ids.users if match_expert_linear(node)]
    with graph.inserting_before(min(readers)):
        counted = graph.call_function(op("count_experts"), (ids, slots_in(graph, num_ranks)))
    counted.meta.update(ids.meta)
    for node in readers:
        node.replace_input_with(ids, counted)
