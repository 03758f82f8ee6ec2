"""A tiny causal LM that runs as an executor does, a runner over it, and an engine loop of ten lines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mllm_compile.runtime.config_sections import KVEventsSection, KVTransferSection, RuntimeSection
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.ops.attention.layer_op import attention_with_output
from mllm_compile.runtime.ops.trace import attention_reference
from mllm_compile.runtime.program.loaded import LoadedModel
from mllm_compile.runtime.runner_config import MOST_VERIFIED, RunnerConfig
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.step.runner import StepRunner
from tests.runtime.attention.attention_cases import make_layer

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 61, 32, 4, 2, 16, 64


class TinyModel:
    """Two layers of attention, the second with a window, between an embedding and a head; no MLP, no norm."""

    weight_bytes = 100_000

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.layers = (
            make_layer(HEADS, KV_HEADS, HEAD_DIM),
            make_layer(HEADS, KV_HEADS, HEAD_DIM, window_left=5, layer_id=1),
        )
        self.embedding, self.positions = weight(VOCAB, HIDDEN), weight(CONTEXT, HIDDEN)
        self.qkv = [weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN) * HIDDEN**-0.5 for _ in self.layers]
        self.out = [weight(HIDDEN, HEADS * HEAD_DIM) * (HEADS * HEAD_DIM) ** -0.5 for _ in self.layers]
        self.head_weight = weight(VOCAB, HIDDEN)
        self.calls: list[tuple[int, int]] = []  # (T, S) of each run of the head

    def begin(self, device: torch.device) -> None:
        """Nothing: it has no pieces."""

    def load(self, device: torch.device) -> LoadedModel:
        for name in ("embedding", "positions", "head_weight"):
            setattr(self, name, getattr(self, name).to(device))
        self.qkv, self.out = [w.to(device) for w in self.qkv], [w.to(device) for w in self.out]
        return LoadedModel(
            executor=self,
            layers=self.layers,
            num_attention_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            num_hidden_layers=2,
            context_len=CONTEXT,
        )

    def body(self, inputs, all_rows=None):
        def attend(q, k, v, layer):
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            attention_with_output(q, k, v, out, layer.name)
            return out

        return self._hidden(inputs["input_ids"], inputs["positions"], attend)

    def head(self, body, logits_indices):
        self.calls.append((body.shape[0], logits_indices.shape[0]))
        return body[logits_indices] @ self.head_weight.T

    def hidden_states(self, body, num_tokens):
        return None

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] of a whole sequence, without cache or batch."""
        ids = torch.tensor(token_ids)

        def attend(q, k, v, layer):
            params = layer.params
            return attention_reference(q, k, v, None, params.sm_scale, params.logits_soft_cap, params.window_left)

        return self._hidden(ids, torch.arange(len(ids)), attend) @ self.head_weight.T

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, attend: Callable) -> torch.Tensor:
        return self._attended(self.embedding[ids] + self.positions[positions], attend)

    def _attended(self, x: torch.Tensor, attend: Callable) -> torch.Tensor:
        for layer, qkv, out in zip(self.layers, self.qkv, self.out, strict=True):
            packed = (x @ qkv.T).unflatten(-1, (-1, HEAD_DIM))
            q, k, v = packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            x = x + attend(q, k, v, layer).flatten(1) @ out.T
        return x


DEFAULTS = RuntimeSection(
    device="cpu",
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    nnodes=1,
    node_rank=0,
    master_addr="127.0.0.1",
    master_port=29501,
    expert_parallel_size=1,
    distributed_executor_backend="mp",
    enable_dbo=False,
    dbo_prefill_token_threshold=8192,
    attention_backend="torch",
    page_size=4,
    kv_cache_dtype="float32",
    state_dtype="float32",
    mem_fraction_static=0.9,
    max_total_tokens=None,
    pinned=False,
    kv_offloading_size=0.0,
    kv_offloading_min_gain=1.0,
    kv_offloading_memory_file=None,
    kv_offloading_disk_path=None,
    kv_offloading_disk_size=0.0,
    kv_offloading_write_policy="write_through",
    kv_load_failure_policy="recompute",
    max_model_len=CONTEXT,
    max_running_requests=8,
    max_num_batched_tokens=64,
    max_step_ms="none",
    enable_prefix_cache=True,
    kv_events_config=KVEventsSection(),
    kv_transfer_config=KVTransferSection(),
    cascade_attention=False,
    without=(),
    deterministic=False,
    any_rows=False,
    enable_sleep_mode=False,
    expert_stats=False,
    routed_experts=False,
    skip_compiled=False,
    seed=0,
    logprobs_mode="raw_logprobs",
)


def make_runner(
    model: TinyModel | None = None,
    num_pages: int | None = 100,
    forward_times_interval_s: float = 0.0,
    draft_model: TinyModel | Sequence[TinyModel] | None = None,
    **runtime,
) -> ModelRunner:
    """Args: draft_model: or several; each one drafts on from the one before."""
    config = RunnerConfig(
        dtype=torch.float32,
        runtime=replace(DEFAULTS, **runtime),
        num_pages=num_pages,
        forward_times_interval_s=forward_times_interval_s,
    )
    drafter = None
    for one in reversed(draft_model if isinstance(draft_model, Sequence) else [draft_model]):
        if one is not None:
            drafter = ModelRunner(replace(config, most_chained=MOST_VERIFIED), one, drafter=drafter)
    runner = ModelRunner(config, model or TinyModel(), drafter=drafter)
    runner.initialize()
    return runner


class Loop:
    """Scheduler and StepRunner, with or without a step launched ahead; checks nothing."""

    def __init__(
        self,
        runner: ModelRunner,
        enable_prefix_cache: bool = False,
        speculation: Speculation | None = None,
        num_drafted: int = 3,
    ) -> None:
        """Args: num_drafted: most tokens of a draft by the runner's draft model, where it has one."""
        self.runner = runner
        self.steps = StepRunner(runner, Sampler())
        if self.steps.drafter is not None:
            alone = Speculation(drafter=self.steps.drafter, num_tokens=num_drafted, vocab_size=VOCAB)
            speculation = alone if speculation is None else replace(speculation, drafter=self.steps.drafter)
        runtime = replace(runner.config.runtime, enable_prefix_cache=enable_prefix_cache)
        self.scheduler = Scheduler(
            SchedulerConfig.of(runtime, runner.config.cudagraph, runner.token_to_kv_pool.num_pages),
            speculation=speculation,
        )
        self.batches: list[ScheduledBatch] = []
        self._ids = itertools.count()

    def add(self, prompt: Sequence[int], bad_phrases: tuple[tuple[int, ...], ...] = (), **params) -> Request:
        """Queue a request; greedy unless a temperature is given. bad_phrases: the tokens of params' bad_words."""
        request = Request(
            request_id=f"request {next(self._ids)}",
            prompt_token_ids=list(prompt),
            params=SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | params)),
            bad_phrases=bad_phrases,
        )
        self.scheduler.add(request)
        return request

    def run(self, overlap: bool = True) -> None:
        """Until no request is left."""
        in_flight = None
        while self.scheduler.has_work():
            in_flight = self._turn(in_flight, overlap)
        if in_flight is not None:
            self._finish(*in_flight)

    def _turn(self, in_flight, overlap: bool):
        batch = self.scheduler.schedule()
        launched = None
        if batch is not None:
            self.batches.append(batch)
            launched = (batch, self.steps.submit(batch))
        if in_flight is not None:
            self._finish(*in_flight)
        if launched is not None and not overlap:
            self._finish(*launched)
            launched = None
        return launched

    def _finish(self, batch: ScheduledBatch, handle) -> None:
        output = handle.wait()
        result = self.scheduler.update(batch, output.token_ids, output.broken_rows.tolist(), output.runs)
        output.record_logprobs(result.accepted, result.counts)
