"""The dispatcher, exhaustively over small batches, and sizes that cannot work."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.errors import CaptureSizeError, ConfigError
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode

TOKENS, REQUESTS = (1, 2, 4, 8, 16), (1, 3, 6)
BOTH = GraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, TOKENS, REQUESTS)


def full(size: int):
    return CUDAGraphMode.FULL, BatchDescriptor(size, num_reqs=size, uniform=True)


def piecewise(size: int):
    return CUDAGraphMode.PIECEWISE, BatchDescriptor(size)


def every_batch(most_tokens: int):
    """(num_tokens, num_reqs, uniform): every uniform decode, and every split of tokens among requests."""
    for num_tokens in range(1, most_tokens + 1):
        yield num_tokens, num_tokens, True
        for num_reqs in range(1, num_tokens + 1):
            yield num_tokens, num_reqs, False


def next_size(sizes, wanted: int) -> int | None:
    return min((size for size in sizes if size >= wanted), default=None)


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_every_batch_gets_the_next_size_up_of_the_best_kind_that_its_mode_has(mode):
    dispatcher = GraphDispatcher(mode, TOKENS, REQUESTS)
    has_full = mode.decode_mode() is CUDAGraphMode.FULL
    has_piecewise = CUDAGraphMode.PIECEWISE in (mode.decode_mode(), mode.mixed_mode())
    for num_tokens, num_reqs, uniform in every_batch(20):
        expected = CUDAGraphMode.NONE, BatchDescriptor(num_tokens, num_reqs=num_reqs, uniform=uniform)
        if has_piecewise and next_size(TOKENS, num_tokens):
            expected = piecewise(next_size(TOKENS, num_tokens))
        if has_full and uniform and next_size(REQUESTS, num_reqs):
            expected = full(next_size(REQUESTS, num_reqs))
        assert dispatcher.dispatch(num_tokens, num_reqs, uniform) == expected


def test_full_is_preferred_to_piecewise_and_piecewise_to_none():
    assert BOTH.dispatch(5, 5, True) == full(6)
    assert BOTH.dispatch(7, 7, True) == piecewise(8)
    assert BOTH.dispatch(5, 5, False) == piecewise(8)
    assert BOTH.dispatch(17, 17, True)[0] is CUDAGraphMode.NONE


def test_a_piecewise_graph_serves_any_number_of_requests():
    assert {BOTH.dispatch(8, num_reqs, False) for num_reqs in range(1, 9)} == {piecewise(8)}
    assert BOTH.dispatch(8, 3, False)[1].num_reqs is None


def test_a_full_graph_of_any_step_is_preferred_to_pieces_unless_it_may_not_serve():
    mixed = GraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, TOKENS, REQUESTS, (12, 5))
    assert mixed.dispatch(6, 6, True) == full(6)
    assert mixed.dispatch(6, 2, False) == (CUDAGraphMode.FULL, BatchDescriptor(12))
    assert mixed.dispatch(6, 2, False, may_mix=False) == piecewise(8)
    assert mixed.dispatch(13, 2, False) == piecewise(16)
    assert set(mixed.descriptors()) - set(BOTH.descriptors()) == {
        (CUDAGraphMode.FULL, BatchDescriptor(size)) for size in (5, 12)
    }
    alone = GraphDispatcher(CUDAGraphMode.FULL, (), REQUESTS, (5, 12))
    assert alone.dispatch(13, 2, False)[0] is CUDAGraphMode.NONE
    decodes = GraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, (), REQUESTS, (5, 12))
    assert decodes.mixed_tokens == ()


def test_prompts_alone_have_full_graphs_of_their_own_where_these_are_captured():
    sizes = CUDAGraphMode.FULL_AND_PIECEWISE, TOKENS, REQUESTS, (5, 12)
    fresh, others = GraphDispatcher(*sizes, fresh_tokens=(12, 5)), GraphDispatcher(*sizes)
    assert fresh.dispatch_prompts(6, extends=False) == BatchDescriptor(12, fresh=True)
    assert fresh.dispatch_prompts(13, extends=False) is others.dispatch_prompts(6, extends=False) is None
    assert fresh.dispatch(6, 2, False) == others.dispatch(6, 2, False)
    assert set(fresh.descriptors()) - set(others.descriptors()) == {
        (CUDAGraphMode.FULL, BatchDescriptor(size, fresh=True)) for size in (5, 12)
    }
    alone = GraphDispatcher(CUDAGraphMode.FULL, (), REQUESTS, fresh_tokens=(5,))
    assert alone.dispatch_prompts(4, extends=False) == BatchDescriptor(5, fresh=True) and not alone.mixed_tokens
    assert GraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, (), REQUESTS, fresh_tokens=(5,)).fresh_tokens == ()


def test_decodes_without_logits_are_captured_beside_the_others_each_with_its_cascade():
    sizes = CUDAGraphMode.FULL_AND_PIECEWISE, TOKENS, REQUESTS, (), REQUESTS[:1]
    others = GraphDispatcher(*sizes).descriptors()
    more = set(GraphDispatcher(*sizes, tokens_alone=True).descriptors()) - set(others)
    decodes = [(mode, descriptor) for mode, descriptor in others if descriptor.uniform]
    assert len(decodes) == len(REQUESTS) + 1
    assert more == {(mode, replace(descriptor, tokens_alone=True)) for mode, descriptor in decodes}


def test_above_the_largest_size_a_batch_keeps_its_own_shape():
    assert BOTH.dispatch(17, 2, False) == (CUDAGraphMode.NONE, BatchDescriptor(17, num_reqs=2))


def test_several_tokens_a_request_are_no_full_decode_even_when_all_bring_as_many():
    assert BOTH.dispatch(6, 3, True) == piecewise(8)


def test_what_is_captured_is_what_can_be_dispatched_to_largest_first():
    captured = BOTH.descriptors()
    assert set(captured) == {*map(full, REQUESTS), *map(piecewise, TOKENS)}
    sizes = [descriptor.num_tokens for _, descriptor in captured]
    assert sizes == sorted(sizes, reverse=True)
    reached = {BOTH.dispatch(*batch) for batch in every_batch(16)}
    assert reached == set(captured)


def test_sizes_in_any_order_and_twice_are_the_same_sizes():
    assert GraphDispatcher(CUDAGraphMode.PIECEWISE, (8, 2, 8, 1)).piecewise_tokens == (1, 2, 8)


def test_sizes_that_the_mode_does_not_capture_are_left_out():
    decode_only = GraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, TOKENS, REQUESTS)
    assert (decode_only.piecewise_tokens, decode_only.decode_requests) == ((), REQUESTS)
    nothing = GraphDispatcher(CUDAGraphMode.NONE, TOKENS, REQUESTS)
    assert nothing.descriptors() == []


@pytest.mark.parametrize(
    ("mode", "tokens", "requests", "said"),
    [
        (CUDAGraphMode.PIECEWISE, (), (), r"cudagraph\.piecewise_tokens: expected positive sizes .*, got \[\]"),
        (CUDAGraphMode.PIECEWISE, (0, 4), (), r"cudagraph\.piecewise_tokens: .* got \[0, 4\]"),
        (CUDAGraphMode.FULL_DECODE_ONLY, (), (-1,), r"cudagraph\.decode_requests: .* got \[-1\]"),
        (CUDAGraphMode.FULL_AND_PIECEWISE, (4,), (), r"cudagraph\.decode_requests: .*full_and_piecewise"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_the_next_step(mode, tokens, requests, said):
    with pytest.raises(CaptureSizeError, match=said) as caught:
        GraphDispatcher(mode, tokens, requests)
    assert "set cudagraph.mode: none" in str(caught.value)


def test_an_unknown_mode_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"expected one of none, piecewise, full, .*got 'breakable'"):
        CUDAGraphMode.from_name("breakable")


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_a_step_runs_in_none_piecewise_or_full(mode):
    assert CUDAGraphMode.from_name(mode.name.lower()) is mode
    assert mode.decode_mode().is_runtime_mode
    assert mode.mixed_mode().is_runtime_mode


def test_the_dispatcher_decides_without_torch():
    code = "import sys; from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher as G, CUDAGraphMode as M"
    code += "; d = G(M.PIECEWISE, [4, 8]); print(d.dispatch(5, 2, False)[1].num_tokens, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["8", "False"]


def test_decodes_of_one_prefix_have_graphs_of_their_own_of_some_sizes():
    dispatcher = GraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, TOKENS, REQUESTS, (), (REQUESTS[-1], 999))
    assert dispatcher.cascade_requests == REQUESTS[-1:]
    found = dispatcher.dispatch_cascade(1)
    assert found == BatchDescriptor(REQUESTS[-1], num_reqs=REQUESTS[-1], uniform=True, cascade=True)
    assert dispatcher.dispatch_cascade(REQUESTS[-1] + 1) is None
    assert (CUDAGraphMode.FULL, found) in dispatcher.descriptors()
    assert BOTH.dispatch_cascade(1) is None


def test_prompts_that_go_on_from_the_cache_have_sizes_of_their_own():
    both = GraphDispatcher(CUDAGraphMode.FULL, (), REQUESTS, fresh_tokens=(5,), extend_tokens=(9, 6))
    assert both.dispatch_prompts(6, extends=True) == BatchDescriptor(6, extends=True)
    assert both.dispatch_prompts(7, extends=True) == BatchDescriptor(9, extends=True)
    assert both.dispatch_prompts(6, extends=False) is both.dispatch_prompts(10, extends=True) is None
    assert {(CUDAGraphMode.FULL, BatchDescriptor(size, extends=True)) for size in (6, 9)} < set(both.descriptors())
    assert GraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, (), REQUESTS, extend_tokens=(5,)).extend_tokens == ()
