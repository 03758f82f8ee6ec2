"""Captured graphs give what the pieces give, bit for bit, whatever the page tables, and padding touches nobody."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from mllm_compile.runtime.cuda_graph.capture import GraphCapturer
from mllm_compile.runtime.cuda_graph.piece_graphs import PieceGraphs
from mllm_compile.runtime.forward_batch import LogitsProcessorOutput
from mllm_compile.runtime.forward_context import set_forward_context
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, GraphKind
from mllm_compile.runtime.model_runner import ModelRunner
from tests.gpu.graph_cases import (
    DECODE_REQUESTS,
    PIECEWISE_TOKENS,
    batch_graphs,
    check_untouched,
    decode_batch,
    fill_pages,
    graphs_of,
    make_gpu_runner,
    mixed_batch,
    num_pages,
    serve,
    snapshot,
    without_replays,
)
from tests.runtime.runner_cases import Loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# With the eager backend FlashInfer's planned kernels decode, with Inductor the program's own.
CASES = [("eager", 64), ("inductor", 16), ("inductor", 64)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def runner(request, cache) -> Iterator[ModelRunner]:
    backend, page_size = request.param
    runner = make_gpu_runner(cache, backend, page_size)
    fill_pages(runner)
    with torch.inference_mode():
        yield runner
    runner.shutdown()


@torch.inference_mode()
def uncaptured(runner: ModelRunner, batch, descriptor, mode=CUDAGraphMode.NONE) -> torch.Tensor:
    """Logits of a batch at the graph's padded shape and with its attention plan, piece by piece; the last piece has all
    tokens too, as other kernels have other roundings."""
    padded, tokens, all_rows = batch_graphs(runner, descriptor.kind).padded_batch(batch, descriptor)
    rows = all_rows if descriptor.uniform else batch.logits_indices
    piecewise = BatchDescriptor(descriptor.num_tokens) if mode is CUDAGraphMode.PIECEWISE else None
    return runner.program.run(padded, tokens, rows, mode, piecewise, all_rows).next_token_logits


@pytest.mark.parametrize("size", DECODE_REQUESTS)
def test_a_full_decode_graph_gives_the_logits_of_the_pieces_bit_for_bit(runner, size):
    graphs = graphs_of(runner)
    for seed, num_requests in enumerate([size, size, size - size // 3]):
        batch = decode_batch(runner, num_requests, seed)
        descriptor = graphs.dispatcher.find(GraphKind.DECODE, num_requests)
        assert descriptor == BatchDescriptor(size, size, GraphKind.DECODE)
        captured = graphs.run(batch).next_token_logits.clone()
        assert captured.isfinite().all()
        assert torch.equal(captured, uncaptured(runner, batch, descriptor)[:num_requests])
        piecewise = uncaptured(runner, batch, descriptor, CUDAGraphMode.PIECEWISE)[:num_requests]
        assert torch.equal(captured, piecewise)


@pytest.mark.parametrize("size", PIECEWISE_TOKENS[1:])
def test_piecewise_graphs_give_the_logits_of_the_pieces_bit_for_bit(runner, size):
    graphs = graphs_of(runner)
    smaller = max(s for s in PIECEWISE_TOKENS if s < size)
    for seed, num_tokens in enumerate({size, smaller + 1}):
        batch = mixed_batch(runner, num_tokens, seed)
        descriptor = next(graphs.dispatcher.candidates(num_tokens))
        assert descriptor == BatchDescriptor(size)
        captured = runner.forward(batch).next_token_logits.clone()
        assert captured.isfinite().all()
        assert torch.equal(captured, uncaptured(runner, batch, descriptor))


@torch.inference_mode()
def test_steps_longer_than_the_upload_have_places_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("mllm_compile.runtime.cuda_graph.padding._MOST_UPLOADED_TOKENS", 16)
    runner = make_gpu_runner(tmp_path)
    try:
        fill_pages(runner)
        graphs = graphs_of(runner)
        assert graphs.inputs.max_tokens == 16 < PIECEWISE_TOKENS[-1]
        for seed, num_tokens in enumerate((12, 40, 33, 64, 12, 50)):
            batch = mixed_batch(runner, num_tokens, seed)
            descriptor = next(graphs.dispatcher.candidates(num_tokens))
            captured = runner.forward(batch).next_token_logits.clone()
            assert captured.isfinite().all()
            assert torch.equal(captured, uncaptured(runner, batch, descriptor))
    finally:
        runner.shutdown()


def test_graphs_agree_with_the_unpadded_model(runner):
    for make in (partial(decode_batch, num_requests=5), partial(mixed_batch, num_tokens=37)):
        batch = make(runner)  # not both first: the second is given rows and pages of the first
        captured = runner.forward(batch).next_token_logits.float()
        eager = runner.run_eager(batch).next_token_logits.float()
        assert (captured - eager).norm() / eager.norm() < 2e-2


def test_a_steps_own_keys_and_values_are_read_after_they_were_written(runner):
    for seed in range(24):
        batch = decode_batch(runner, 1 + seed % DECODE_REQUESTS[-1], seed)
        results = []
        for _ in range(3):
            for layer in runner.model.layers:
                for pages in runner.token_to_kv_pool.get_pages(layer.layer_id):
                    pages.flatten(0, 1)[batch.out_cache_loc] = math.nan
            results.append(runner.forward(batch).next_token_logits.clone())
        assert results[0].isfinite().all()
        assert all(torch.equal(result, results[0]) for result in results)


def test_a_graph_replayed_over_pages_that_were_freed_and_given_to_others_reads_the_new_owners(runner):
    graphs, descriptor = graphs_of(runner), BatchDescriptor(4, num_reqs=4, kind=GraphKind.DECODE)
    for seed in range(6):  # each seed gives the same pages to other rows, at other places
        fill_pages(runner, seed=seed)
        batch = decode_batch(runner, 4, seed)
        captured = graphs.run(batch).next_token_logits.clone()
        assert torch.equal(captured, uncaptured(runner, batch, descriptor))
        expected = runner.run_eager(batch).next_token_logits.float()
        assert (captured.float() - expected).norm() / expected.norm() < 2e-2


def test_padding_touches_no_page_and_no_request_row_in_a_batch_of_any_size(runner):
    decodes, pieces = batch_graphs(runner, GraphKind.DECODE), batch_graphs(runner, GraphKind.PIECEWISE)
    fill_pages(runner, value=7.0)
    for size in DECODE_REQUESTS:
        for num_requests in {1, max(1, size - 1)}:
            batch = decode_batch(runner, num_requests, seed=size)
            before = snapshot(runner)
            decodes.replay(batch, BatchDescriptor(size, num_reqs=size, kind=GraphKind.DECODE))
            check_untouched(runner, before, batch.out_cache_loc)
    for size in PIECEWISE_TOKENS:
        batch = mixed_batch(runner, 1, seed=size)
        before = snapshot(runner)
        batch.logits_indices = torch.zeros(1, dtype=torch.int64, device="cuda")
        pieces.replay(batch, BatchDescriptor(size))
        check_untouched(runner, before, batch.out_cache_loc)
    fill_pages(runner)


def test_500_steps_of_requests_that_join_and_leave_give_the_tokens_that_they_give_without_graphs(runner):
    captured = serve(runner, 500)

    def piece_by_piece(batch, descriptor) -> LogitsProcessorOutput:
        if descriptor.uniform:
            return LogitsProcessorOutput(uncaptured(runner, batch, descriptor)[: batch.batch_size])
        tokens = batch_graphs(runner, descriptor.kind).padded_batch(batch, descriptor).tokens
        return runner.program.run(batch, tokens, batch.logits_indices)

    with without_replays(runner, (GraphKind.DECODE, GraphKind.PIECEWISE), piece_by_piece):
        assert serve(runner, 500) == captured


def test_a_step_leaves_the_last_tokens_of_other_rows_alone(runner):
    loop = Loop(runner)
    runner.row_state.last_tokens.fill_(-5)
    runner.row_state.last_tokens[0] = 0
    for i in range(3):
        loop.add([5 + i, 6], max_tokens=6)
    loop.run()
    assert (runner.row_state.last_tokens[4:] == -5).all()
    assert runner.row_state.last_tokens[0] == 0


def test_every_size_is_captured_with_its_time_and_memory(runner):
    figures = graphs_of(runner).figures
    sizes = [(figure.kind, figure.num_tokens) for figure in figures]
    captured = graphs_of(runner).dispatcher.sizes
    assert captured[GraphKind.DECODE] == DECODE_REQUESTS and captured[GraphKind.PIECEWISE] == PIECEWISE_TOKENS
    assert set(sizes) == {(kind, size) for kind, of_kind in captured.items() for size in of_kind}
    assert [n for _, n in sizes] == sorted((n for _, n in sizes), reverse=True)
    assert all(figure.seconds > 0 for figure in figures)
    assert 0 < sum(figure.mib for figure in figures) < 300


def test_a_size_that_was_not_captured_is_an_error_not_a_capture_while_serving(runner):
    batch = mixed_batch(runner, 3)
    batch.logits_indices = torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(RuntimeError, match=r"num_tokens=3.*before serving began"):
        batch_graphs(runner, GraphKind.PIECEWISE).replay(batch, BatchDescriptor(3))


@pytest.fixture
def piece() -> Iterator[tuple[GraphCapturer, list[torch.Tensor]]]:
    with torch.inference_mode():
        yield GraphCapturer(torch.device("cuda")), [torch.ones(4, device="cuda"), torch.ones(4, device="cuda")]


def run_piece(graphs: PieceGraphs, inputs: list[torch.Tensor]) -> torch.Tensor:
    context = set_forward_context(
        {},
        no_compile_layers={},
        slot_mapping={},
        num_tokens=4,
        cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
        batch_descriptor=BatchDescriptor(4),
    )
    with context:
        return graphs(inputs)[0]


@pytest.mark.parametrize("debug", [True, False])
def test_an_input_that_has_moved_since_the_capture_is_an_error_in_debug_mode(piece, debug):
    capturer, inputs = piece
    graphs = PieceGraphs(lambda tensors: [tensors[0] + tensors[1]], capturer, debug)
    with capturer.session():
        run_piece(graphs, inputs)
    inputs[0].fill_(3)
    assert run_piece(graphs, inputs).tolist() == [4.0] * 4
    moved = [inputs[0].clone(), inputs[1]]
    if debug:
        with pytest.raises(RuntimeError, match="has moved"):
            run_piece(graphs, moved)
    else:
        run_piece(graphs, moved)


def test_a_piece_of_views_alone_is_captured_without_a_warning(piece):
    capturer, inputs = piece
    graphs = PieceGraphs(lambda tensors: [tensors[0][1:3]], capturer, debug=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with capturer.session():
            run_piece(graphs, inputs)
    inputs[0].fill_(3)
    assert run_piece(graphs, inputs).tolist() == [3.0] * 2


def test_a_closed_runner_gives_all_device_memory_back(cache):
    make_gpu_runner(cache).shutdown()
    before = torch.cuda.memory_allocated()
    runner = make_gpu_runner(cache)
    with torch.inference_mode():
        runner.forward(decode_batch(runner, 3))
    runner.shutdown()
    del runner
    assert torch.cuda.memory_allocated() == before


def test_without_graphs_the_same_runner_has_none(cache):
    runner = make_gpu_runner(cache, mode="none")
    assert runner.graph_runner is None
    assert runner.config.cudagraph.mode == "none"
    assert runner.max_total_num_tokens == (num_pages(64) - 1) * 64
    runner.shutdown()
