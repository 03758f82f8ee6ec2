"""Whole steps with prompts in one graph: what its kernels give one by one, whatever decodes and prompts come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.metadata import StepPrompts
from mllm_compile.runtime.cuda_graph.graph_runner import GraphRunner
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_batch import ForwardBatch
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode
from mllm_compile.runtime.model_runner import LogitsProcessorOutput, ModelRunner
from mllm_compile.runtime.ops.turns import NUM_TURNS
from mllm_compile.runtime.step_fields import INPUTS, StepFields
from tests.gpu.graph_cases import (
    check_untouched,
    fill_pages,
    graphs_of,
    make_gpu_runner,
    mixed_batch,
    place_requests,
    serve,
    snapshot,
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
def uncaptured(runner: ModelRunner, batch: ForwardBatch, size: int) -> LogitsProcessorOutput:
    """The step with the graph's shape and attention plan, piece by piece."""
    graphs = graphs_of(runner)
    graphs._places(size).take_tokens(batch, size)
    graphs.inputs.take_requests(batch, min(size, graphs.inputs.max_requests))
    runner.attn_backend.mixed.init_forward_metadata_replay_mixed(size, batch)
    runner.attn_backend.mixed.begin_captured_mixed(size, graphs.inputs.req_pool_indices)
    padded, rows = graphs._padding_prompts(size), graphs._logits_rows(batch)
    return runner.program.run(padded, graphs._tokens(size), rows, all_rows=graphs._rows[:size])


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
        mode, descriptor = graphs.dispatcher.dispatch(batch.num_tokens, batch.batch_size, False)
        assert (mode, descriptor) == (CUDAGraphMode.FULL, BatchDescriptor(size))
        captured = runner.forward(batch).next_token_logits.clone()
        assert captured.isfinite().all()
        assert torch.equal(captured, uncaptured(runner, batch, size).next_token_logits)
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
        table[1:] = -1  # who read it would read elsewhere
        before = snapshot(runner)
        starts, none = np.array([0, *ends], dtype=np.int32), np.zeros(len(lengths), dtype=np.int32)
        prompts = StepPrompts(starts, none, *[fields.req_pool_indices] * 2, lambda: pytest.fail("they need no pages"))
        launched = runner.launch_prompts(fields, prompts)
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
    assert launches > NUM_TURNS


def test_served_prompts_are_launched_so_and_get_their_tokens(runner, monkeypatch):
    graphs, prompts = graphs_of(runner), [list(range(5, 5 + length)) for length in (1, 3, 8, 24, 25, 33, 60, 64)]
    launch, launches = graphs.launch_prompts, []

    def served() -> list[list[int]]:
        loop, requests = Loop(runner), []
        for prompt in prompts:
            requests.append(loop.add(prompt, max_tokens=4, ignore_eos=True))
            loop.run()
        return [request.output_token_ids for request in requests]

    monkeypatch.setattr(graphs, "launch_prompts", lambda *step: launches.append(launch(*step)) or launches[-1])
    captured = served()
    assert len(launches) == len(prompts) and None not in launches
    monkeypatch.setattr(graphs, "launch_prompts", lambda *step: None)
    same = [one == other for one, other in zip(captured, served(), strict=True)]
    assert sum(same) >= len(same) - 1, "but for rounding they are the same"


@pytest.mark.parametrize("listed_ahead", [False, True])
def test_a_replay_follows_pages_that_were_given_to_others(runner, monkeypatch, listed_ahead):
    steps = runner.attn_backend._captured_mixed._steps
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
    graphs = graphs_of(runner)
    fill_pages(runner, value=7.0)
    for size in MIXED_TOKENS:
        for batch in batches_of(runner, size):
            before = snapshot(runner)
            graphs._replay_mixed(batch, BatchDescriptor(size))
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
    monkeypatch.setattr(graphs_of(runner), "_replay_mixed", lambda *_: pytest.fail("it was replayed whole"))
    pieces = runner.forward(batch).next_token_logits.float()
    assert (whole - pieces).norm() / pieces.norm() < 2e-2


class UncapturedMixed(GraphRunner):
    """The same sizes, padding and attention plans, no step with prompts replayed whole."""

    def _replay_mixed(self, batch, descriptor):
        return uncaptured(self._runner, batch, descriptor.num_tokens)


def test_300_steps_of_requests_that_join_and_leave_give_the_same_tokens(runner):
    graphs = graphs_of(runner)
    captured = serve(runner, 300)
    without = object.__new__(UncapturedMixed)
    without.__dict__.update(graphs.__dict__)
    runner.graph_runner = without
    try:
        assert serve(runner, 300) == captured
    finally:
        runner.graph_runner = graphs


def test_every_size_is_captured(runner):
    figures = graphs_of(runner).figures
    # A step has at most 128 tokens.
    for kind, sizes in (("MIXED", MIXED_TOKENS), ("FRESH", (64, 128)), ("EXTEND", (16, 64, 128))):
        assert [figure.num_tokens for figure in figures if figure.mode == kind] == list(reversed(sizes))


def test_sizes_that_were_asked_for_are_refused_where_attention_cannot_be_captured(cache):
    with pytest.raises(ConfigError, match=r"cudagraph.mixed_tokens is \[8, 24, 64\], but decodes are not by kernels"):
        runner_of(cache, "triton", backend="eager")
