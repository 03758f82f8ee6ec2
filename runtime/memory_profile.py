"""Profiles a model's memory, and computes how many KV pages fit beside it. It runs the largest step and captures some
graphs on a pool of the dummy page alone.

device/memory.py knows what a device has and how it is shared out; here is what this model takes of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Protocol

import torch

from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.device.memory import cpu_kv_budget, cuda_kv_budget, give_back_unused
from mllm_compile.runtime.forward_batch import ForwardBatch, LogitsProcessorOutput
from mllm_compile.runtime.graph_mode import GraphKind
from mllm_compile.runtime.media.feature_pool import FeaturePool
from mllm_compile.runtime.memory_pool import GDNPool, KVPool
from mllm_compile.runtime.program.images import ImageEncoder
from mllm_compile.runtime.program.seen_images import StatesOfImages
from mllm_compile.runtime.program.sources import SourceEncoder, most_states
from mllm_compile.runtime.sampling.sampler import sample_tokens

logger = logging.getLogger(__name__)


class ProfiledModel(CapturableModel, Protocol):
    """A model whose pages are to be counted, all its other memory allocated; ModelRunner's methods are documented
    there.

    Its pool of pages and its attention backend are the profile's for that long, as forward reads them there. Afterwards
    it has none.
    """

    token_to_kv_pool: KVPool
    state_pool: GDNPool
    feature_pool: FeaturePool | None

    @property
    def drafters(self) -> Sequence[ProfiledModel]: ...

    @property
    def captures_graphs(self) -> bool: ...

    @property
    def divides_steps(self) -> bool: ...

    @property
    def kv_bytes_per_page(self) -> int: ...

    @property
    def state_bytes_per_request(self) -> int: ...

    @property
    def feature_bytes(self) -> int: ...

    @property
    def max_source_len(self) -> int: ...

    @property
    def usual_source_len(self) -> int: ...

    def make_kv_pool(self, num_pages: int) -> KVPool: ...

    def init_attention_backend(self) -> None: ...

    def image_encoder(self) -> ImageEncoder: ...

    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput: ...


def count_pages(runner: ProfiledModel) -> int:
    """The KV pages that fit, the dummy page with them; all ranks get the least number of any.

    Raises:
        DeviceMemoryError: the largest step, or the KV of one request, does not fit.
    """
    config = runner.config
    if runner.device.type == "cuda":
        runners = [runner, *runner.drafters]
        bytes_each: list[int] = []
        budget = cuda_kv_budget(config.runtime, runner.device, partial(_run_largest_batches, runners, bytes_each))
        if runner.drafters:
            num_bytes = config.num_kept_hidden_states(len(runner.drafters)) * bytes_each[0]
            budget = budget.without(num_bytes, "hidden states that drafts are made of")
        if graph_bytes := _graph_bytes(runners):
            budget = budget.without(graph_bytes, "CUDA graphs (by a trial capture)")
    else:
        budget = cpu_kv_budget(config.runtime.num_ranks)
        # Pages of memory that were not written yet still count as free.
        budget = budget.without(runner.state_pool.num_rows * runner.state_bytes_per_request, "states")
        budget = budget.without(runner.feature_bytes, "features of images")
        if runner.model.lora is not None:
            budget = budget.without(runner.model.lora.pool.nbytes, "adapters")
    num_pages = budget.num_pages(runner.kv_bytes_per_page, config.runtime, runner.usual_source_len)
    if runner.communicator is not None:
        num_pages = runner.communicator.least(num_pages)
    logger.debug("%d KV pages of %d tokens: %s", num_pages, config.runtime.page_size, budget.explanation)
    return num_pages


def _graph_bytes(runners: Sequence[ProfiledModel]) -> int:
    """Bytes of all graphs of a model and its draft model, whose passes behind verify steps are graphs too."""
    total, num_verifies, depths = 0, 0, runners[0].config.speculative.captured_depths
    for runner in runners:
        if not runner.captures_graphs:
            continue
        # Each depth has about as many sizes. A block is drafted by one pass.
        num_passes = 1 if runner.model.block is not None or not depths else math.ceil(fmean(depths))
        num_bytes, num_verifies = _estimate_graph_bytes(runner, num_passes * num_verifies)
        total += num_bytes
    return total


def _estimate_graph_bytes(runner: ProfiledModel, num_behind: int) -> tuple[int, int]:
    """Bytes of a model's graphs, from the two largest of each kind, captured on a pool of the dummy page alone, and of
    `num_behind` passes behind verify steps of another model; and how many graphs of verify steps it has."""
    from mllm_compile.runtime.cuda_graph.draft_chain import chain_obstacle
    from mllm_compile.runtime.cuda_graph.graph_runner import estimate_graph_bytes
    from mllm_compile.runtime.cuda_graph.kinds import dispatcher_of

    runner.token_to_kv_pool = runner.make_kv_pool(1)
    runner.init_attention_backend()
    dispatcher = dispatcher_of(runner)
    num_bytes = estimate_graph_bytes(runner, dispatcher, num_behind if chain_obstacle(runner) is None else 0)
    del runner.token_to_kv_pool, runner.attn_backend, runner.source_attention, runner.image_attention
    give_back_unused(runner.device)
    return num_bytes, dispatcher.num_graphs(GraphKind.VERIFY)


def _run_largest_batches(runners: Sequence[ProfiledModel], bytes_each: list[int]) -> None:
    """Runs the largest batch of each: steps of a model and its draft model follow each other. Adds what
    run_largest_batch returns."""
    bytes_each += map(run_largest_batch, runners)


@torch.inference_mode()
def run_largest_batch(runner: ProfiledModel) -> int:
    """Runs forward and sampling at the limits of a step, on the dummy row and a pool of the dummy page alone. Returns
    the bytes of a token's hidden states, where the program gives some; else 0."""
    config, device = runner.config, runner.device
    num_requests = config.max_rows
    num_tokens = min(config.runtime.max_num_batched_tokens, num_requests * config.runtime.max_model_len)
    new_cpu = torch.full((num_requests,), num_tokens // num_requests, dtype=torch.int32)
    new_cpu[: num_tokens % num_requests] += 1
    new = new_cpu.to(device)
    runner.token_to_kv_pool = runner.make_kv_pool(1)
    runner.init_attention_backend()
    batch = runner.prepare_forward_batch_extend(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        req_pool_indices=torch.zeros(num_requests, dtype=torch.int64, device=device),
        seq_lens=new,
        extend_seq_lens=new,
        extend_prefix_lens=torch.zeros_like(new),
        out_cache_loc=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        extend_seq_lens_cpu=new_cpu,
        extend_prefix_lens_cpu=torch.zeros_like(new_cpu),
    )
    if runner.model.lora is not None:  # whose program takes more than the one without adapters
        batch.adapter_slots = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    most_drafted = config.speculative.most_drafted_of(num_requests)
    if most_drafted and not config.runtime.deterministic:  # layers with a state keep what they compute of these
        batch.num_verify_tokens = min(num_tokens, num_requests + most_drafted)
    if runner.feature_pool is not None:
        encoder = runner.image_encoder()
        encoder.run_largest(config.runtime.max_model_len)
        encoder.fill(batch, runner.feature_pool, int(new_cpu[0]))
    if runner.model.sources is not None:
        most = max(
            most_states(runner.model.sources.facts, config.runtime.max_num_batched_tokens), runner.max_source_len
        )
        SourceEncoder(runner.model.sources, config.dtype, device).encode_largest(most, runner.token_to_kv_pool)
    if runner.model.images is not None:
        StatesOfImages(runner.model.images, config.dtype, device).encode_largest(runner.token_to_kv_pool)
    if config.max_sampled > num_requests:
        batch.logits_indices = torch.arange(min(config.max_sampled, num_tokens), device=device)
    output = runner.forward(batch)
    logits, hidden_states = output.next_token_logits, output.hidden_states  # of all ranks with requests of their own
    if runner.divides_steps:
        runner.run_eager(batch)  # steps that are not divided may be as large
    ones = torch.ones(logits.shape[0], device=device)
    how = (ones, ones * 0.9, (ones * 50).long())
    if logits.shape[0]:  # of a pipeline the last stage alone has some
        sample_tokens(logits, *how, None, positions=ones.long(), pieces=runner.model.sampling)
    del runner.token_to_kv_pool, runner.attn_backend, runner.source_attention, runner.image_attention
    return 0 if hidden_states is None else hidden_states[0].nbytes
