"""The dispatcher, exhaustively over small steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, GraphKind

TOKENS, REQUESTS = (1, 2, 4, 8, 16), (1, 3, 6)
BOTH = GraphDispatcher({GraphKind.PIECEWISE: TOKENS, GraphKind.DECODE: REQUESTS})


def decode(size: int) -> BatchDescriptor:
    return BatchDescriptor(size, num_reqs=size, kind=GraphKind.DECODE)


def piecewise(size: int) -> BatchDescriptor:
    return BatchDescriptor(size)


def first(dispatcher: GraphDispatcher, *step, **how) -> BatchDescriptor | None:
    return next(dispatcher.candidates(*step, **how), None)


def next_size(sizes, wanted: int) -> int | None:
    return min((size for size in sizes if size >= wanted), default=None)


@pytest.mark.parametrize("kinds", [(), ("DECODE",), ("PIECEWISE",), ("DECODE", "PIECEWISE")])
def test_every_step_gets_the_next_size_up_of_the_best_kind_that_is_captured(kinds):
    sizes = {"DECODE": REQUESTS, "PIECEWISE": TOKENS}
    dispatcher = GraphDispatcher({GraphKind[kind]: sizes[kind] for kind in kinds})
    for num_tokens in range(1, 21):
        for is_decode in (True, False):
            expected = None
            if "PIECEWISE" in kinds and next_size(TOKENS, num_tokens):
                expected = piecewise(next_size(TOKENS, num_tokens))
            if "DECODE" in kinds and is_decode and next_size(REQUESTS, num_tokens):
                expected = decode(next_size(REQUESTS, num_tokens))
            assert first(dispatcher, num_tokens, is_decode) == expected


def test_decodes_are_preferred_to_pieces_and_above_the_largest_size_nothing_is():
    assert list(BOTH.candidates(5, is_decode=True)) == [decode(6), piecewise(8)]
    assert first(BOTH, 7, is_decode=True) == piecewise(8)
    assert first(BOTH, 5) == piecewise(8)
    assert first(BOTH, 17, is_decode=True) is None


def test_graphs_of_any_number_of_requests_say_so():
    assert piecewise(8).num_reqs is None and not piecewise(8).uniform
    assert decode(6).num_reqs == 6 and decode(6).uniform


def test_a_whole_graph_of_any_step_is_preferred_to_pieces_unless_a_step_reads_more_than_it_has():
    mixed = GraphDispatcher(BOTH.sizes | {GraphKind.MIXED: (12, 5)})
    whole = BatchDescriptor(12, kind=GraphKind.MIXED)
    assert first(mixed, 6, is_decode=True) == decode(6)
    assert first(mixed, 7, is_decode=True) == whole
    assert list(mixed.candidates(6)) == [whole, piecewise(8)]
    assert list(mixed.candidates(6, is_whole=False)) == [piecewise(8)]
    assert list(mixed.candidates(6, is_decode=True, is_whole=False)) == [piecewise(8)]
    assert first(mixed, 13) == piecewise(16)


@pytest.mark.parametrize("kind", GraphKind)
def test_a_kind_has_sizes_of_its_own(kind):
    others = {other: (7,) for other in GraphKind if other is not kind}
    dispatcher = GraphDispatcher(others | {kind: (12, 5)})
    assert dispatcher.find(kind, 6) == BatchDescriptor(12, num_reqs=12 if kind.is_decode else None, kind=kind)
    assert dispatcher.find(kind, 13) is GraphDispatcher(others).find(kind, 6) is None
    assert dispatcher.most_tokens == 12 and GraphDispatcher({}).most_tokens == 0


def test_all_captured_graphs_are_listed_largest_first_and_of_one_size_pieces_first():
    every = GraphDispatcher(dict.fromkeys(GraphKind, (8, 3)))
    listed = every.descriptors()
    assert [descriptor.num_tokens for descriptor in listed] == [8] * len(GraphKind) + [3] * len(GraphKind)
    assert [descriptor.kind for descriptor in listed] == [*GraphKind, *GraphKind]
    assert listed[0] == piecewise(8)
    assert {first(BOTH, n, is_decode) for n in range(1, 17) for is_decode in (True, False)} == set(BOTH.descriptors())


def test_the_largest_sizes_of_some_kinds_are_a_dispatcher_too():
    found = BOTH.largest(2, [GraphKind.PIECEWISE, GraphKind.MIXED])
    assert found.descriptors() == [piecewise(16), piecewise(8)]


def test_sizes_in_any_order_and_twice_are_the_same_sizes():
    assert GraphDispatcher({GraphKind.PIECEWISE: (8, 2, 8, 1)}).sizes[GraphKind.PIECEWISE] == (1, 2, 8)


def test_a_mode_captures_decodes_pieces_and_steps_with_prompts():
    named = {mode.name: {kind.name for kind in GraphKind if mode.captures(kind)} for mode in CUDAGraphMode}
    decodes = {kind.name for kind in GraphKind if kind.is_decode} | {"VERIFY"}
    prompts = {"MIXED", "PREFILL_NEW", "PREFILL_CACHED"}
    assert named == {
        "NONE": set(),
        "PIECEWISE": {"PIECEWISE"},
        "FULL": decodes | prompts,
        "FULL_DECODE_ONLY": decodes,
        "FULL_AND_PIECEWISE": decodes | prompts | {"PIECEWISE"},
    }


def test_an_unknown_mode_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"expected one of none, piecewise, full, .*got 'breakable'"):
        CUDAGraphMode.from_name("breakable")


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_a_step_runs_in_none_piecewise_or_full(mode):
    assert CUDAGraphMode.from_name(mode.name.lower()) is mode
    assert mode.decode_mode().is_runtime_mode
    assert mode.mixed_mode().is_runtime_mode


def test_the_dispatcher_decides_without_torch():
    code = "import sys; from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher as G, GraphKind as K"
    code += "; d = G({K.PIECEWISE: [4, 8]}); print(d.find(K.PIECEWISE, 5).num_tokens, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["8", "False"]


@pytest.mark.parametrize("kind", GraphKind)
def test_each_size_has_a_graph_with_adapters_and_one_without_unless_all_steps_take_adapters(kind):
    both, one = (GraphDispatcher({kind: (4, 8)}, 3, always_takes_adapters=always) for always in (False, True))
    assert [(found.num_tokens, found.has_lora) for found in both.descriptors()] == [
        (8, False), (8, True), (4, False), (4, True),
    ]  # fmt: skip
    assert (
        one.descriptors()
        == one.largest(2, [kind]).descriptors()
        == [both.find(kind, 8, True), both.find(kind, 4, True)]
    )
    assert one.find(kind, 4) is GraphDispatcher({kind: (4, 8)}).find(kind, 4, has_lora=True) is None
    assert (both.num_graphs(kind), one.num_graphs(kind)) == (4, 2)
