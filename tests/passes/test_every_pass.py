"""Invariants of every pass, over graphs that passes get wrong: a pass in the list is tested without a line here.

Each graph goes through the whole pipeline once. After each pass its numbers are unchanged, for one token and for seven,
with the pieces for any number of tokens and with their variants for few. Nodes give what their metadata says; graph and
pieces are valid; and the pass does nothing the second time. Kernels are stand-ins (support/stand_ins.py); an op in
`needs` has to have one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import fx

from mllm_compile.passes.add_lora import AddLora
from mllm_compile.passes.base import (
    PACKED_WEIGHTS,
    VARIANTS,
    GraphPass,
    PackedPart,
    PassResult,
)
from mllm_compile.passes.canonicalise import Canonicalise
from mllm_compile.passes.fuse_add_norm import FuseAddNorm
from mllm_compile.passes.fuse_rank_sums import FuseRankSums
from mllm_compile.passes.gate_in_recurrences import GateInRecurrences
from mllm_compile.passes.launch_lora import LaunchLora
from mllm_compile.passes.match import nodes
from mllm_compile.passes.norm_in_recurrences import NormInRecurrences
from mllm_compile.passes.scale_keys_and_values import ScaleKeysAndValues
from mllm_compile.passes.shard import Shard
from mllm_compile.passes.spread_experts import SpreadExperts
from mllm_compile.passes.sum_in_one_order import SumInOneOrder
from mllm_compile.passes.unrepeat_keys import UnrepeatKeys
from mllm_compile.passes.verify import verify_graph
from tests.passes.support.every_graph import GRAPHS, decoder_in_fp8, in_place_neighbours, layers
from tests.passes.support.graph_builder import (
    VOCAB,
    assert_values_hold,
    done,
    run,
    text,
)
from tests.passes.support.stand_ins import ALL, FOR_GPUS, stand_in_ops, streamed_ops_on_cpu

TOKENS = (1, 7)


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu() -> Iterator[None]:
    with streamed_ops_on_cpu(), stand_in_ops(ALL), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "KERNEL_DTYPES", (torch.bfloat16, torch.float16, torch.float32))
        yield


@dataclass(frozen=True)
class Step:
    """One pass over one graph: what it said, what it did to the numbers, and what it did the second time."""

    matches: int
    error: float
    again: int
    is_stable: bool


def off_by(gm: fx.GraphModule, numbers: list[torch.Tensor]) -> float:
    """By how much it is off from what the trace gave, relatively, at the most."""
    outputs = [(run(gm, tokens), theirs) for tokens, theirs in zip(TOKENS, numbers, strict=True)]
    if gm.meta.get(VARIANTS):
        for tokens, theirs in zip(TOKENS, numbers, strict=True):
            with variants_for(gm, tokens):
                outputs.append((run(gm, tokens), theirs))
    errors = [(ours - theirs).norm() / theirs.norm() for ours, theirs in outputs]
    return torch.stack(errors).max().item()  # which is NaN if one is, unlike Python's max


@contextmanager
def variants_for(gm: fx.GraphModule, tokens: int) -> Iterator[None]:
    """Calls the variants that a step of so many tokens takes, in place of the pieces."""
    calls = {node: str(node.target) for node in gm.graph.find_nodes(op="call_module")}
    for node, piece in calls.items():
        variants = gm.meta.get(VARIANTS, {}).get(piece, {})
        node.target = next((name for size, name in sorted(variants.items()) if size >= tokens), piece)
    gm.recompile()
    yield
    for node, piece in calls.items():
        node.target = piece
    gm.recompile()


class State:
    """All of a graph that its numbers come from, and what its nodes are said to give."""

    def __init__(self, gm: fx.GraphModule) -> None:
        graphs = [gm.graph, *(piece.graph for _, piece in sorted(gm.named_children()))]
        nodes_of_all = [node for graph in graphs for node in graph.nodes]
        inputs = [(node.meta.get("weight_name"), node.meta.get("input_name")) for node in nodes_of_all]
        self._told = text(gm), repr(gm.meta), [node.name for node in nodes_of_all], inputs
        self._values = [node.meta.get("val") for node in nodes_of_all]

    def is_that_of(self, gm: fx.GraphModule) -> bool:
        other = State(gm)
        return self._told == other._told and all(map(operator.is_, self._values, other._values))


def apply(
    graph_pass: type[GraphPass],
    gm: fx.GraphModule,
    numbers: list[torch.Tensor],
    passes: list[str],
    error_before: float | None = None,
) -> tuple[fx.GraphModule, Step]:
    """Runs the pass, twice; `passes` have run when it has. Where `error_before`, `gm`'s, is known, and the pass says
    that it does nothing and leaves all as it was, that is all: neither numbers nor a second time are others."""
    before = State(gm)
    result = graph_pass()(gm)
    gm = result.gm
    verify_graph(gm, passes)
    gm.recompile()
    if error_before is not None and not result.matches and before.is_that_of(gm):
        return gm, Step(0, error_before, 0, True)
    error = off_by(gm, numbers)
    assert_values_hold(gm)
    once = text(gm)
    again = graph_pass()(gm)
    again.gm.recompile()
    return again.gm, Step(result.matches, error, again.matches, text(again.gm) == once)


@cache
def through(make: Callable[[], fx.GraphModule]) -> tuple[dict[str, Step | Exception], float]:
    """Each pass' step, or what it raised; and the error that is rounding's."""
    gm = make()
    numbers = [run(gm, tokens) for tokens in TOKENS]
    steps: dict[str, Step | Exception] = {}
    error_before = None
    for graph_pass in FOR_GPUS:
        try:
            gm, step = apply(graph_pass, gm, numbers, done(graph_pass.name), error_before)
            steps[graph_pass.name], error_before = step, step.error
        except Exception as error:
            steps[graph_pass.name] = error
            break
    has_rounding = any(node.meta.get("val") is not None and _is_half(node) for node in gm.graph.nodes)
    rounding = 8e-2 if make is decoder_in_fp8 else 2e-2
    return steps, rounding if has_rounding else 1e-5


def _is_half(node: fx.Node) -> bool:
    return getattr(node.meta["val"], "dtype", None) in (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", [graph_pass.name for graph_pass in FOR_GPUS])
def test_a_pass_keeps_numbers_and_values_and_does_nothing_the_second_time(name, make):
    steps, limit = through(make)
    if name not in steps:
        pytest.skip("a pass ahead of it has failed")
    step = steps[name]
    if isinstance(step, Exception):
        raise step
    assert step.error <= limit, "its numbers are others"
    assert (step.again, step.is_stable) == (0, True), "the second time it changes the graph"


# They change graphs that are told of ranks, scales or adapters, or have layers with a state, in tests of their own.
OF_STATES = (UnrepeatKeys, GateInRecurrences, NormInRecurrences)
OF_ONE_ORDER = SumInOneOrder, FuseAddNorm
ELSEWHERE = (Shard, SpreadExperts, FuseRankSums, *OF_STATES, ScaleKeysAndValues, AddLora, LaunchLora, *OF_ONE_ORDER)


@pytest.mark.parametrize("graph_pass", [one for one in FOR_GPUS if one not in ELSEWHERE], ids=lambda one: one.name)
def test_there_is_a_graph_that_a_pass_changes(graph_pass):
    """Else the tests above say nothing of it."""
    steps = [through(make)[0].get(graph_pass.name) for make in GRAPHS]
    assert any(isinstance(step, Step) and step.matches for step in steps)


class DropScales(GraphPass):
    """x * `scale` → x."""

    name = "drop_scales"
    scale = 1.0

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before, found = len(gm.graph.nodes), []
        for node in list(gm.graph.nodes):
            if nodes.is_call(node, operator.mul) and node.args[1] == self.scale:
                found.append(node)
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        return PassResult(gm, len(found), before, len(gm.graph.nodes))


class DropOtherScales(DropScales):
    scale = 2.0


@pytest.mark.parametrize(("graph_pass", "is_right"), [(DropScales, True), (DropOtherScales, False)])
def test_a_wrong_pass_is_found_beside_writes_and_a_right_one_is_not(graph_pass, is_right):
    gm = in_place_neighbours()
    numbers = [run(gm, tokens) for tokens in TOKENS]
    gm, _ = apply(Canonicalise, gm, numbers, ["canonicalise"])
    _, step = apply(graph_pass, gm, numbers, ["canonicalise", graph_pass.name])
    assert step.matches == 1
    assert (step.error <= 1e-5) == is_right


def rename_a_weight(gm: fx.GraphModule) -> None:
    node = next(node for node in gm.graph.nodes if node.meta.get("weight_name", "").endswith(".o.weight"))
    node.meta["weight_name"] = "another.weight"


def pack_a_weight(gm: fx.GraphModule) -> None:
    name = next(node.meta["weight_name"] for node in gm.graph.nodes if "weight_name" in node.meta)
    gm.meta[PACKED_WEIGHTS] = {name: (PackedPart("another.weight", 0, VOCAB),)}


@pytest.mark.parametrize("change", [rename_a_weight, pack_a_weight])
def test_what_a_pass_does_to_numbers_is_found_where_it_says_that_it_does_nothing(change):
    class SaysNothing(GraphPass):
        name = "says_nothing"

        def __call__(self, gm: fx.GraphModule) -> PassResult:
            change(gm)
            return PassResult(gm, 0, len(gm.graph.nodes), len(gm.graph.nodes))

    gm = layers()
    numbers = [run(gm, tokens) for tokens in TOKENS]
    gm, step = apply(Canonicalise, gm, numbers, ["canonicalise"])
    _, step = apply(SaysNothing, gm, numbers, ["canonicalise"], step.error)
    assert step.error > 1e-3


def test_a_value_that_is_said_to_be_another_is_found_where_a_pass_says_that_it_does_nothing():
    class SaysNothing(GraphPass):
        name = "says_nothing"

        def __call__(self, gm: fx.GraphModule) -> PassResult:
            node = next(node for node in gm.graph.nodes if nodes.is_call(node, torch.add))
            node.meta["val"] = node.meta["val"].to(torch.float64)
            return PassResult(gm, 0, len(gm.graph.nodes), len(gm.graph.nodes))

    gm = layers()
    numbers = [run(gm, tokens) for tokens in TOKENS]
    with pytest.raises(AssertionError, match="said to be"):
        apply(SaysNothing, gm, numbers, [], 0.0)
