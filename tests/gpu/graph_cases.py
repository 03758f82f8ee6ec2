"""The embedded model in bfloat16 on a GPU with captured graphs, and random batches over random page tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.attention.metadata import StepPrompts
from mllm_compile.runtime.cuda_graph.graph_runner import GraphRunner
from mllm_compile.runtime.cuda_graph.kind import BatchGraphs
from mllm_compile.runtime.cuda_graph.padding import PaddedBatch
from mllm_compile.runtime.cuda_graph.prompts import LaunchedPrompts
from mllm_compile.runtime.forward_batch import ForwardBatch, LogitsProcessorOutput
from mllm_compile.runtime.graph_mode import BatchDescriptor, GraphKind
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.step_fields import StepFields
from mllm_compile.store.source import ArtifactSource, runner_config
from tests.runtime.runner_cases import Loop
from tests.tiny_model import tiny_config

DECODE_REQUESTS = (1, 2, 4, 8, 16)
PIECEWISE_TOKENS = (1, 2, 4, 8, 16, 40, 64)


def num_pages(page_size: int) -> int:
    """Room for DECODE_REQUESTS[-1] requests of 300 tokens, and some."""
    return 20 + 6400 // page_size


def make_gpu_runner(
    cache: Path,
    backend: str = "eager",
    page_size: int = 64,
    model: dict[str, str] | None = None,
    mixed_tokens: tuple[int, ...] = (),
    most_tokens: int = 128,
    longest: int = 512,
    **changes,
) -> ModelRunner:
    """The embedded model, or another; graphs of DECODE_REQUESTS, PIECEWISE_TOKENS and `mixed_tokens` captured, unless
    `changes`, of the section `cudagraph`, say otherwise. A step has up to `most_tokens`,
    a request up to `longest`."""
    config = tiny_config(
        cache,
        model={"dtype": "bfloat16"} | (model or {}),
        compile={"backend": backend},
        runtime={
            "device": "cuda",
            "page_size": page_size,
            "max_running_requests": DECODE_REQUESTS[-1],
            "max_num_batched_tokens": most_tokens,
            "max_model_len": longest,
        },
        cudagraph={
            "decode_requests": DECODE_REQUESTS,
            "piecewise_tokens": PIECEWISE_TOKENS,
            "mixed_tokens": mixed_tokens,
        },
    )
    compiled = load_or_compile(config, NullReporter())
    settings = runner_config(compiled.config)
    settings = replace(settings, num_pages=num_pages(page_size), cudagraph=replace(settings.cudagraph, **changes))
    runner = ModelRunner(settings, ArtifactSource(compiled, NullReporter()))
    runner.initialize()
    return runner


def graphs_of(runner: ModelRunner) -> GraphRunner:
    if runner.graph_runner is None:
        raise RuntimeError("the runner has no graphs")
    return runner.graph_runner


def batch_graphs(runner: ModelRunner, kind: GraphKind) -> BatchGraphs:
    graphs = graphs_of(runner).kinds[kind]
    assert isinstance(graphs, BatchGraphs)
    return graphs


def launch_prompts(runner: ModelRunner, fields: StepFields[np.ndarray], prompts: StepPrompts) -> LaunchedPrompts | None:
    """Prompts alone in one launch; None where they are not captured, or not served well."""
    graphs = graphs_of(runner).prompts
    assert graphs is not None
    descriptor = graphs.find(fields.positions.size, prompts.prefix_lens, fields.adapter_slots is not None)
    return None if descriptor is None else graphs.launch(descriptor, fields, prompts)


class Uncaptured(BatchGraphs):
    """The sizes, padding and attention plans of captured graphs, with no graph replayed."""

    def __init__(
        self, graphs: BatchGraphs, run: Callable[[ForwardBatch, BatchDescriptor], LogitsProcessorOutput]
    ) -> None:
        self._graphs, self._run = graphs, run

    @staticmethod
    def sizes(runner, kind):
        raise NotImplementedError("they are captured")

    def capture(self, descriptor: BatchDescriptor) -> None:
        raise NotImplementedError("they are captured")

    def serves(self, batch: ForwardBatch) -> bool:
        return self._graphs.serves(batch)

    def padded_batch(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> PaddedBatch:
        return self._graphs.padded_batch(batch, descriptor)

    def replay(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> LogitsProcessorOutput:
        return self._run(batch, descriptor)


@contextmanager
def without_replays(
    runner: ModelRunner,
    kinds: Collection[GraphKind],
    run: Callable[[ForwardBatch, BatchDescriptor], LogitsProcessorOutput],
) -> Iterator[None]:
    """Steps of these kinds are run by `run`; the runner has no captured decodes that choose their tokens, if DECODE is
    among them."""
    graphs = graphs_of(runner)
    without = copy(graphs)
    without.kinds = {**graphs.kinds, **{kind: Uncaptured(batch_graphs(runner, kind), run) for kind in kinds}}
    runner.graph_runner = without
    try:
        yield
    finally:
        runner.graph_runner = graphs


def fill_pages(runner: ModelRunner, value: float | None = None, seed: int = 0) -> None:
    """Random keys and values in every page but the dummy one; or `value`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for layer in runner.model.layers:
        for pages in runner.token_to_kv_pool.get_pages(layer.layer_id):
            if value is None:
                pages[1:] = torch.randn(pages[1:].shape, generator=generator, device="cuda").to(pages.dtype)
            else:
                pages[1:] = value


@dataclass(frozen=True)
class Requests:
    """Rows with pages of their own, in random order."""

    rows: np.ndarray  # [R]
    seq_lens: np.ndarray  # [R], new tokens included
    slots: list[np.ndarray]  # of each request's positions


def place_requests(runner: ModelRunner, seq_lens: list[int], seed: int) -> Requests:
    """Gives random rows random pages for so many tokens; earlier owners lose them."""
    rng = np.random.default_rng(seed)
    page_size = runner.config.runtime.page_size
    rows = rng.permutation(runner.config.runtime.max_running_requests)[: len(seq_lens)] + 1
    counts = [-(-length // page_size) for length in seq_lens]
    pages = rng.permutation(num_pages(page_size) - 1)[: sum(counts)] + 1
    of_each = np.split(pages, np.cumsum(counts)[:-1])
    runner.req_to_token_pool.write_pages(
        torch.from_numpy(np.repeat(rows, counts)).cuda(),
        torch.from_numpy(np.concatenate([np.arange(count) for count in counts])).cuda(),
        torch.from_numpy(pages).cuda(),
        page_size,
    )
    slots = [
        (own[:, None] * page_size + np.arange(page_size)).ravel()[:length]
        for own, length in zip(of_each, seq_lens, strict=True)
    ]
    return Requests(rows, np.array(seq_lens, dtype=np.int32), slots)


def decode_batch(runner: ModelRunner, num_requests: int, seed: int = 0) -> ForwardBatch:
    """Requests of 1 to 300 tokens, one of them new."""
    rng = np.random.default_rng(seed)
    requests = place_requests(runner, rng.integers(1, 300, num_requests).tolist(), seed)
    return runner.prepare_forward_batch_decode(
        torch.from_numpy(rng.integers(0, runner.vocab_size, num_requests)).cuda(),
        torch.from_numpy(requests.rows).cuda(),
        torch.from_numpy(requests.seq_lens).cuda(),
        torch.tensor([slots[-1] for slots in requests.slots]).cuda(),
        seq_lens_cpu=torch.from_numpy(requests.seq_lens),
    )


def mixed_batch(
    runner: ModelRunner, num_tokens: int, seed: int = 0, num_decodes: int | None = None, longest_prefix: int = 200
) -> ForwardBatch:
    """`num_tokens` new tokens: some decodes, then a chunk of a prompt with a prefix and one without, where they fit."""
    rng = np.random.default_rng(seed)
    num_decodes = min(num_tokens // 3, 6) if num_decodes is None else num_decodes
    rest = num_tokens - num_decodes
    new = [1] * num_decodes + ([rest // 2, rest - rest // 2] if rest > 1 else [rest])
    prefix = [int(rng.integers(longest_prefix // 200, longest_prefix)) for _ in new]
    prefix[-1] = 0
    requests = place_requests(runner, [p + n for p, n in zip(prefix, new, strict=True)], seed)
    new_lens, prefix_lens = torch.tensor(new, dtype=torch.int32), torch.tensor(prefix, dtype=torch.int32)
    out_cache_loc = np.concatenate([slots[p:] for slots, p in zip(requests.slots, prefix, strict=True)])
    return runner.prepare_forward_batch_extend(
        torch.from_numpy(rng.integers(0, runner.vocab_size, num_tokens)).cuda(),
        torch.from_numpy(requests.rows).cuda(),
        torch.from_numpy(requests.seq_lens).cuda(),
        new_lens.cuda(),
        prefix_lens.cuda(),
        torch.from_numpy(out_cache_loc).cuda(),
        num_decodes=num_decodes,
        extend_seq_lens_cpu=new_lens,
        extend_prefix_lens_cpu=prefix_lens,
    )


def snapshot(runner: ModelRunner) -> list[torch.Tensor]:
    pages = [
        pages.clone() for layer in runner.model.layers for pages in runner.token_to_kv_pool.get_pages(layer.layer_id)
    ]
    return [runner.req_to_token_pool.req_to_token.clone(), *pages]


def restore_written(after: list[torch.Tensor], before: list[torch.Tensor], slots: torch.Tensor) -> None:
    """Undo, in `after`, what may have changed: the batch's own slots and the dummy page."""
    for new, old in zip(after[1:], before[1:], strict=True):
        flat_new, flat_old = new.flatten(0, 1), old.flatten(0, 1)
        flat_new[slots] = flat_old[slots]
        new[0] = old[0]


def check_untouched(runner: ModelRunner, before: list[torch.Tensor], own_slots: torch.Tensor) -> None:
    after = snapshot(runner)
    assert not torch.equal(after[1].flatten(0, 1)[own_slots], before[1].flatten(0, 1)[own_slots]), "the step did write"
    restore_written(after, before, own_slots)
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))


def serve(runner: ModelRunner, num_steps: int) -> list[list[int]]:
    """Tokens of requests that join and leave at random over `num_steps` steps."""
    rng = random.Random(0)
    loop, requests, in_flight = Loop(runner), [], None
    for step in range(num_steps):
        if step % 4 == 0 or not loop.scheduler.has_work():
            prompt = [rng.randrange(3, runner.vocab_size) for _ in range(rng.randrange(1, 90))]
            requests.append(loop.add(prompt, max_tokens=rng.randrange(1, 70), ignore_eos=True))
        in_flight = loop._turn(in_flight, overlap=True)
    loop._finish(*in_flight)
    sizes = {batch.num_requests for batch in loop.batches}
    assert len(sizes) > 8, "they join and leave"
    assert sum(batch.num_decodes > 0 for batch in loop.batches) >= num_steps - 20
    return [request.output_token_ids for request in requests]
