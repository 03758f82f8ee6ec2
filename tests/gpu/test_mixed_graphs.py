"""Whole steps with prompts in one graph: what its kernels give one by one, whatever decodes and prompts come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.metadata import StepPrompts
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_batch import ForwardBatch
from mllm_compile.runtime.graph_mode import BatchDescriptor, GraphKind
from mllm_compile.runtime.model_runner import LogitsProcessorOutput, ModelRunner
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS
from mllm_compile.runtime.step_fields import INPUTS, StepFields
from tests.gpu.graph_cases import (
    batch_graphs,
    check_untouched,
    fill_pages,
    graphs_of,
    launch_prompts,
    make_gpu_runner,
    mixed_batch,
    place_requests,
    serve,
    snapshot,
    without_replays,
)
from tests.gpu.small_shape import SHAPE
from tests.runtime.runner_cases import Loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

MIXED_TOKENS = (8, 24, 64)
# With 16 query heads a KV head Triton's kernels decode, with 2 CUDA kernels of ours.
HEADS = {"triton": (32, 2), "cuda": (16, 8)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def runner_of(cache, heads: str, **changes) -> ModelRunner:
    folder = cache / heads
    folder.mkdir(exist_ok=True)
    num_heads, num_kv_heads = HEADS[heads]
    config = SHAPE | {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    (folder / "config.json").write_text(json.dumps(config))
    model = {"path": str(folder), "load_format": "dummy"}
    return make_gpu_runner(cache, **({"backend": "inductor", "model": model, "mixed_tokens": MIXED_TOKENS} | changes))


@pytest.fixture(scope="module", params=HEADS)
def runner(request, cache) -> Iterator[ModelRunner]:
    runner = runner_of(cache, request.param)
    fill_pages(runner)
    with torch.inference_mode():
        yield runner
    runner.shutdown()


@torch.inference_mode()
def uncaptured(runner: ModelRunner, batch: ForwardBatch, descriptor: BatchDescriptor) -> LogitsProcessorOutput:
    """The step with the graph's shape and attention plan, piece by piece."""
    padded, tokens, all_rows = batch_graphs(runner, GraphKind.MIXED).padded_batch(batch, descriptor)
    runner.attn_backend.mixed.begin_captured_mixed(descriptor.num_tokens, graphs_of(runner).inputs.req_pool_indices)
    return runner.program.run(padded, tokens, batch.logits_indices, all_rows=all_rows)


def batches_of(runner: ModelRunner, size: int) -> Iterator[ForwardBatch]:
    """Prompts alone, with as many decodes as may be, with some; of all tokens and of fewer."""
    smaller = max((s for s in MIXED_TOKENS if s < size), default=0)
    for seed, num_tokens in enumerate((size, size - 1, smaller + 1)):
        for num_decodes in {0, min(num_tokens - 1, 14), num_tokens // 3}:
            if num_tokens > num_decodes <= 14:
                yield mixed_batch(runner, num_tokens, seed, num_decodes)


@pytest.mark.parametrize("size", MIXED_TOKENS)
def test_a_graph_of_any_step_gives_the_logits_of_the_pieces_bit_for_bit(runner, size):
    graphs = graphs_of(runner)
    for batch in batches_of(runner, size):
        descriptor = next(graphs.dispatcher.candidates(batch.num_tokens))
        assert descriptor == BatchDescriptor(size, kind=GraphKind.MIXED)
        captured = runner.forward(batch).next_token_logits.clone()
        assert captured.isfinite().all()
        assert torch.equal(captured, uncaptured(runner, batch, descriptor).next_token_logits)
        unpadded = runner.run_eager(batch).next_token_logits.float()
        assert (captured.float() - unpadded).norm() / unpadded.norm() < 2e-2


def prompts_of(size: int) -> Iterator[list[int]]:
    """Lengths of prompts: one, two, as many as may be; of all tokens and of fewer."""
    smaller = max((s for s in MIXED_TOKENS if s < size), default=1)
    for num_tokens in (size, size - 1, smaller + 1):
        for count in sorted({1, 2, min(num_tokens // 2, 14)}):
            lengths = [num_tokens // count] * (count - 1)
            yield [num_tokens - sum(lengths), *lengths]


def prompt_batch(runner: ModelRunner, lengths: list[int], seed: int) -> ForwardBatch:
    rng, requests = np.random.default_rng(seed), place_requests(runner, lengths, seed)
    new = torch.tensor(lengths, dtype=torch.int32)
    return runner.prepare_forward_batch_extend(
        torch.from_numpy(rng.integers(0, runner.vocab_size, sum(lengths))).cuda(),
        torch.from_numpy(requests.rows).cuda(),
        new.cuda(),
        new.cuda(),
        torch.zeros_like(new).cuda(),
        torch.from_numpy(np.concatenate(requests.slots)).cuda(),
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=torch.zeros_like(new),
    )


@pytest.mark.parametrize("size", MIXED_TOKENS)
def test_prompts_in_one_launch_give_their_logits_whatever_the_table_of_slots_says(runner, size):
    table = runner.req_to_token_pool.req_to_token
    num_heads = runner.model.layers[0].num_heads
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    launches = 0
    for seed, lengths in enumerate(prompts_of(size)):
        batch = prompt_batch(runner, lengths, seed)
        ends = np.cumsum(lengths)
        fields = StepFields(**{name: getattr(batch, name).cpu().numpy() for name in INPUTS})
        fields.logits_indices, fields.page_places = ends - 1, np.arange(seed)
        listed = table.clone()
        table[1:] = -1  # a kernel that reads it would read elsewhere
        before = snapshot(runner)
        starts, none = np.array([0, *ends], dtype=np.int32), np.zeros(len(lengths), dtype=np.int32)
        prompts = StepPrompts(starts, none, *[fields.req_pool_indices] * 2, lambda: pytest.fail("they need no pages"))
        launched = launch_prompts(runner, fields, prompts)
        assert (launched is None) == (len(lengths) * num_heads > num_sms), "one tile each"
        if launched is not None:
            launches += 1
            logits = launched.head(launched.fields.logits_indices).next_token_logits.float()
            for name, value in (fields.inputs() | fields.others()).items():
                assert getattr(launched.fields, name).tolist() == value.tolist()
            assert logits.isfinite().all()
            check_untouched(runner, before, batch.out_cache_loc)
        table.copy_(listed)
        if launched is not None:
            batch.logits_indices = torch.from_numpy(ends - 1).cuda()
            eager = runner.run_eager(batch).next_token_logits.float()
            assert (logits - eager).norm() / eager.norm() < 2e-2
    assert launches > REPLAY_SLOTS


def test_served_prompts_are_launched_so_and_get_their_tokens(runner, monkeypatch):
    prompts = [list(range(5, 5 + length)) for length in (1, 3, 8, 24, 25, 33, 60, 64)]
    graphs = graphs_of(runner).prompts
    launch, launches = graphs.launch, []

    def served() -> list[list[int]]:
        loop, requests = Loop(runner), []
        for prompt in prompts:
            requests.append(loop.add(prompt, max_tokens=4, ignore_eos=True))
            loop.run()
        return [request.output_token_ids for request in requests]

    monkeypatch.setattr(graphs, "launch", lambda *step: launches.append(launch(*step)) or launches[-1])
    captured = served()
    assert len(launches) == len(prompts) and None not in launches
    monkeypatch.setattr(graphs, "launch", lambda *step: None)
    same = [one == other for one, other in zip(captured, served(), strict=True)]
    assert sum(same) >= len(same) - 1, "but for rounding they are the same"


@pytest.mark.parametrize("listed_ahead", [False, True])
def test_a_replay_follows_pages_that_were_given_to_others(runner, monkeypatch, listed_ahead):
    steps = runner.attn_backend.mixed.steps._steps
    if listed_ahead:  # where a page table is large: the graph, which lists them too here, then changes nothing
        steps[24] = replace(steps[24], lists_pages=False)
    for seed in range(6):
        fill_pages(runner, seed=seed)
        batch = mixed_batch(runner, 20, seed)
        captured = runner.forward(batch).next_token_logits.float()
        unpadded = runner.run_eager(batch).next_token_logits.float()
        assert (captured - unpadded).norm() / unpadded.norm() < 2e-2
    steps[24] = replace(steps[24], lists_pages=True)


def test_it_touches_no_page_and_no_row_but_its_own(runner):
    graphs = batch_graphs(runner, GraphKind.MIXED)
    fill_pages(runner, value=7.0)
    for size in MIXED_TOKENS:
        for batch in batches_of(runner, size):
            before = snapshot(runner)
            graphs.replay(batch, BatchDescriptor(size, kind=GraphKind.MIXED))
            check_untouched(runner, before, batch.out_cache_loc)
    fill_pages(runner)


def test_further_logits_can_be_asked_for(runner):
    batch = mixed_batch(runner, 20)
    batch.return_logprob = True
    indices = torch.tensor([3, 19, 0], device="cuda")
    captured = runner.forward(batch).logits_of(indices).clone()
    assert captured.isfinite().all() and captured.shape == (3, runner.vocab_size)
    others = mixed_batch(runner, 20)
    others.logits_indices = indices
    assert torch.equal(captured, runner.forward(others).next_token_logits)


def test_a_batch_that_is_not_served_well_runs_piece_by_piece(runner, monkeypatch):
    """Few tokens behind a long prefix, say; tests/runtime/attention/test_flashinfer_kernels.py has which."""
    batch = mixed_batch(runner, 20)
    whole = runner.forward(batch).next_token_logits.float()
    assert runner.attn_backend.mixed.runs_well_captured(batch)
    monkeypatch.setattr(runner.attn_backend.mixed, "runs_well_captured", lambda batch: False)
    whole_graphs = batch_graphs(runner, GraphKind.MIXED)
    monkeypatch.setattr(whole_graphs, "replay", lambda *_: pytest.fail("it was replayed whole"))
    pieces = runner.forward(batch).next_token_logits.float()
    assert (whole - pieces).norm() / pieces.norm() < 2e-2


def test_300_steps_of_requests_that_join_and_leave_give_the_same_tokens(runner):
    captured = serve(runner, 300)
    with without_replays(runner, (GraphKind.MIXED,), lambda *step: uncaptured(runner, *step)):
        assert serve(runner, 300) == captured


def test_every_size_is_captured(runner):
    figures = graphs_of(runner).figures
    # A step has at most 128 tokens.
    prompts = {GraphKind.PREFILL_NEW: (64, 128), GraphKind.PREFILL_CACHED: (16, 64, 128)}
    for kind, sizes in {GraphKind.MIXED: MIXED_TOKENS, **prompts}.items():
        assert [figure.num_tokens for figure in figures if figure.kind is kind] == list(reversed(sizes))


def test_sizes_that_were_asked_for_are_refused_where_attention_cannot_be_captured(cache):
    with pytest.raises(ConfigError, match=r"cudagraph.mixed_tokens is \[8, 24, 64\], but decodes are not by kernels"):
        runner_of(cache, "triton", backend="eager")
