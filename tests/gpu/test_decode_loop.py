"""Decodes in one launch: the kernels around the model, and the tokens of steps that are run so."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from mllm_compile.check.decode_loop import check_decode_loop
from mllm_compile.inductor.compile_piece import compile_piece
from mllm_compile.kernels.decode_loop import decode_loop_pieces
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS
from mllm_compile.runtime.program.loaded import DecodeLoopPieces
from mllm_compile.runtime.program.pieces import load_piece
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.sampling.state import IS_GREEDY, NUM_FLOATS, NUM_INTS
from mllm_compile.runtime.step.runner import StepRunner
from tests.gpu.graph_cases import DECODE_REQUESTS, decode_batch, fill_pages, graphs_of, make_gpu_runner
from tests.runtime.runner_cases import Loop
from tests.runtime.sampling.sampling_cases import random_logits
from tests.runtime.step.decode_loop_cases import OTHERS, PLAIN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# Vocabularies as test_sampling_pieces.py has them, with pages of one token, of a power of two and of neither.
KINDS = [("bfloat16", 151_936, 64), ("float16", 50_257, 1), ("float32", 200, 100), ("bfloat16", 3000, 16)]


@pytest.mark.parametrize(("dtype", "vocab_size", "page_size"), KINDS)
def test_the_kernels_do_what_torchs_operations_do(tmp_path, dtype, vocab_size, page_size):
    pieces = {}
    sizes = dict.fromkeys("TSLM", 8192) | dict.fromkeys("PWRC", 2**31 - 1) | {"N": 32}
    for piece in decode_loop_pieces(dtype, vocab_size, page_size):
        (tmp_path / "piece.py").write_text(piece.source)
        package = tmp_path / f"{piece.name}.pt2"
        compile_piece(tmp_path / "piece.py", list(piece.inputs), "cuda:0", sizes, package, tmp_path)
        pieces[piece.name] = load_piece(package.name, package.read_bytes())
    logits = random_logits(9, seed=1, spread=3.0, vocab_size=vocab_size).to(getattr(torch, dtype)).cuda()
    logits[0, [vocab_size - 1, 17, vocab_size // 2]] = 50.0  # of equals the lowest
    check_decode_loop(DecodeLoopPieces(pieces["begin_decode"], pieces["end_decode"]), page_size, logits)
    end = pieces["end_decode"]
    before, _ = _end(end, logits)
    logits[1], logits[4, vocab_size // 2], logits[6, 0], logits[7] = torch.nan, torch.nan, torch.inf, -torch.inf
    tokens, last_tokens = _end(end, logits)
    broken = torch.tensor([1, 4, 6, 7], device="cuda")
    assert tokens[broken].tolist() == [NO_TOKEN] * 4
    assert last_tokens[broken].tolist() == [0] * 4, "a step under way needs an id"
    fine = torch.tensor([0, 2, 3, 5, 8], device="cuda")
    assert torch.equal(tokens[fine], before[fine])


def _end(piece, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the newest of each row, of a step whose even rows are greedy."""
    floats = torch.ones(NUM_FLOATS, 9, device="cuda")
    ints = torch.zeros(NUM_INTS, 9, dtype=torch.int64, device="cuda")
    ints[IS_GREEDY, ::2] = 1
    rows = torch.arange(9, device="cuda")
    replay_slot, last_tokens = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.full_like(rows, -7)
    chosen = torch.zeros(REPLAY_SLOTS, 9, dtype=torch.int64, device="cuda")
    tokens = piece([logits, floats, ints, rows, rows.int(), replay_slot, last_tokens, chosen])[0]
    assert torch.equal(chosen[0], tokens)
    return tokens, last_tokens


@pytest.fixture(scope="module", params=[16, 64])
def runners(request, tmp_path_factory) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """With the decode loop and without."""
    cache = tmp_path_factory.mktemp("cache")
    made = tuple(make_gpu_runner(cache, "inductor", request.param, sample_in_graph=on) for on in (True, False))
    with torch.inference_mode():
        yield made
    for runner in made:
        runner.shutdown()


def serve(runner: ModelRunner, kinds: list[dict]) -> list:
    """Tokens and scored tokens of requests that join and leave."""
    fill_pages(runner)
    loop = Loop(runner)
    loop.steps = StepRunner(runner, Sampler(runner.model.sampling))
    rng = random.Random(0)
    requests, in_flight = [], None
    for step in range(300):
        if step % 4 == 0 or not loop.scheduler.has_work():
            prompt = [rng.randrange(3, 3000) for _ in range(rng.randrange(1, 90))]
            limits = {"max_tokens": rng.randrange(1, 70), "ignore_eos": True}
            requests.append(loop.add(prompt, **limits, **rng.choice(kinds)))
        in_flight = loop._turn(in_flight, overlap=True)
    while in_flight is not None:
        in_flight = loop._turn(in_flight, overlap=True)
    scores = [[(s.token_id, s.rank, s.logprob) for s in request.output_logprobs] for request in requests]
    return [[request.output_token_ids for request in requests], scores]


@pytest.mark.parametrize("kinds", [PLAIN, PLAIN + OTHERS], ids=["plain", "any"])
def test_requests_that_join_and_leave_get_the_tokens_that_launches_around_the_graphs_give(runners, kinds, monkeypatch):
    looped, without = runners
    launches = []
    decodes = graphs_of(looped).decodes
    launch = decodes.launch
    monkeypatch.setattr(decodes, "launch", lambda *of: launches.append(of) or launch(*of))
    tokens = serve(looped, kinds)
    assert len(launches) > 100
    assert graphs_of(without).decodes.loop is None
    assert tokens == serve(without, kinds)


def test_batches_that_come_as_tensors_and_steps_in_one_launch_use_one_slot_after_another(runners):
    runner, _ = runners
    graphs, state = graphs_of(runner), runner.row_state.sampling
    state.clear_all()
    state.flush()
    fill_pages(runner)
    for seed in range(3 * REPLAY_SLOTS):
        batch = decode_batch(runner, 1 + seed % DECODE_REQUESTS[-1], seed)
        given = runner.forward(batch).next_token_logits.clone()
        runner.row_state.last_tokens[batch.req_pool_indices] = batch.input_ids
        rows, slots = batch.req_pool_indices.cpu().numpy(), batch.out_cache_loc.cpu().numpy()
        decode = graphs.decodes.launch(rows, batch.seq_lens_cpu.numpy(), slots)
        decode.slot.wait()
        assert torch.equal(decode.logits, given)
        expected = given.argmax(-1).tolist()
        assert decode.slot.tokens[: len(rows)].tolist() == decode.tokens.tolist() == expected
        assert runner.row_state.last_tokens[batch.req_pool_indices].tolist() == expected


@pytest.mark.parametrize("limits", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_a_row_that_becomes_no_number_in_a_captured_decode_ends_alone(runners, limits):
    """Its KV is made NaN between two steps."""

    def answers(runner, is_broken, victims_tokens=24):
        fill_pages(runner)
        loop = Loop(runner)
        loop.steps = StepRunner(runner, Sampler(runner.model.sampling))
        lengths = [24, victims_tokens, 24, 24]
        requests = [
            loop.add([5 + i, 9, 17 * i + 3], max_tokens=lengths[i], ignore_eos=True, **limits) for i in range(4)
        ]
        in_flight = None
        for step in range(40):
            if is_broken and step == 9:
                slot = int(loop.scheduler.pages.table[requests[1].row, 0]) * runner.config.runtime.page_size
                for layer in range(len(runner.model.layers)):
                    runner.token_to_kv_pool.get_kv_buffer(layer)[1][slot] = torch.nan
            in_flight = loop._turn(in_flight, overlap=True)
        return requests

    for runner in runners:
        requests = answers(runner, is_broken=True)
        assert [request.is_broken for request in requests] == [False, True, False, False]
        count = len(requests[1].output_token_ids)
        assert 1 < count < 22
        # A request that ends by its length leaves after the same step: its missing token's, and one in flight.
        expected = answers(runner, is_broken=False, victims_tokens=count + 2)
        assert requests[1].output_token_ids == expected[1].output_token_ids[:count]
        others = [0, 2, 3]
        assert [requests[i].output_token_ids for i in others] == [expected[i].output_token_ids for i in others]
        torch.cuda.synchronize()
