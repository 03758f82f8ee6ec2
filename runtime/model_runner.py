"""Runs a loaded model on batches: owns the device, the pools, the attention backend and the graphs.

Its bases are in program/: pools.py, ranks.py, batches.py. Others decide which: memory_profile.py how many pages,
state/factory.py which backend, cuda_graph/kinds.py which graphs. program/runner.py runs a batch once its attention is
planned; or cuda_graph/graph_runner.py replays it. step/runner.py makes an engine's steps: it turns a ScheduledBatch
into a ForwardBatch, and its logits into tokens.

Shape legend: T tokens, R requests, S rows of logits, V vocab.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mllm_compile.runtime.attention.base import AttentionBackend
from mllm_compile.runtime.collectives.base import Communicator
from mllm_compile.runtime.collectives.stages import StagedCommunicator
from mllm_compile.runtime.device.arena import arena_on
from mllm_compile.runtime.device.memory import check_weights_fit
from mllm_compile.runtime.device.open import open_device, prefer_cublaslt, sum_in_one_order
from mllm_compile.runtime.device.sleep import SleepingMemory
from mllm_compile.runtime.device.thread_trial import StepThreads
from mllm_compile.runtime.errors import DeviceMemoryError, RequestError
from mllm_compile.runtime.forward_batch import ForwardBatch, LogitsProcessorOutput, TokenInputs
from mllm_compile.runtime.forward_context import ForwardTimes
from mllm_compile.runtime.graph_mode import DPMetadata, UBatchSlice
from mllm_compile.runtime.memory_pool import RoutePool
from mllm_compile.runtime.memory_profile import count_pages
from mllm_compile.runtime.program.batches import RunnerBatches
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.images import ImageEncoder
from mllm_compile.runtime.program.loaded import ModelSource
from mllm_compile.runtime.program.pipeline import Pipeline
from mllm_compile.runtime.program.pools import RunnerPools
from mllm_compile.runtime.program.runner import ProgramRunner
from mllm_compile.runtime.program.seen_images import ImageAttention
from mllm_compile.runtime.program.sources import SourceAttention
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.runtime.sampling.logprobs import token_logprobs
from mllm_compile.runtime.sampling.sampler import sample_tokens
from mllm_compile.runtime.state.factory import make_backend
from mllm_compile.runtime.state.hybrid_backend import HybridAttnBackend
from mllm_compile.runtime.ubatch.overlap import BatchOverlap
from mllm_compile.runtime.ubatch.slices import check_divides, most_of_a_part, share_a_request, ubatch_of, ubatch_slices

if TYPE_CHECKING:
    from mllm_compile.runtime.cuda_graph.graph_runner import GraphRunner
    from mllm_compile.runtime.cuda_graph.model import ChainedDrafts
    from mllm_compile.runtime.sampling.penalties import PenaltyParams

logger = logging.getLogger(__name__)


class ModelRunner(RunnerPools, RunnerBatches):
    """Runs a loaded model. `initialize()` before anything else, `shutdown()` at the end.

    An engine's steps drive it; docs/low-level.md has the same by hand.

    Attributes:
        program: runs the model on batches whose attention is planned.
        max_total_num_tokens: tokens that the KV pages hold, the dummy page left out.
        forward_pass_id: forwards so far, captured decodes and prompts included.
        row_state: a StepRunner's, and captured decodes'.
        expert_counts: layer of experts → [E] int64, how often each expert was chosen; None unless config.runtime
            asks for it.
        drafter: runs the draft model, over pages of the same ids and the same rows; None: no tokens are drafted by one.
            It may have one itself, which drafts the token behind its own.
        draft_chain: the drafter's pass behind captured verify steps; None: it has none.
        step_threads: the CPU's threads of each kind of step; None: they are not changed from step to step.
        forward_times: times of forwards by number of tokens, None unless config.forward_times_interval_s asks for them.
    """

    drafter: ModelRunner | None

    def __init__(
        self,
        config: RunnerConfig,
        source: ModelSource,
        meet: Callable[[], Communicator] | None = None,
        drafter: ModelRunner | None = None,
    ) -> None:
        """
        Args:
            drafter: of a draft model, initialised with this one.
            meet: waits for the other ranks, if the model is cut over several: then all make the same calls of the
                communicator in one order. Called when the model is loaded.
        """
        self.config = config
        self.communicator: Communicator | None = None
        self.pipeline: Pipeline | None = None
        self._meet = meet
        self.forward_pass_id = 0
        self.graph_runner: GraphRunner | None = None
        self.step_threads: StepThreads | None = None
        self._source = source
        self.drafter = drafter
        self.draft_chain: ChainedDrafts | None = None

    # Lifecycle --------------------------------------------------------------------------------------------------------

    def initialize(self, stage: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        """Take the device, load the model, allocate pools, plan attention, capture graphs.

        Args:
            stage: `with stage(name)` is around each of them but the loading, which the source reports on itself.

        Raises:
            DeviceError: the device or a library for it is missing.
            DeviceMemoryError: weights, the largest step or the KV of one request do not fit.
            ConfigError, UnsupportedModelError: the attention backend cannot do what is asked.
        """
        with stage("open device"):
            self.device = open_device(self.config.runtime.device)
        if self.device.type == "cuda":
            prefer_cublaslt()
            if self.config.runtime.any_rows:
                sum_in_one_order()
        try:
            with self.on_device():
                self.load_model(stage)
            with self.on_device():  # with the communicator that is there now
                with stage("allocate KV cache"):
                    self.init_memory_pool()
                for one in (*self.drafters, self):  # the drafter's pass may be captured behind verify steps
                    with stage("prepare attention"):
                        one.init_attention_backend()
                    with stage("capture graphs"):
                        one.init_cuda_graphs()
        except BaseException:
            self.shutdown()
            raise

    @property
    def drafters(self) -> tuple[ModelRunner, ...]:
        """The runner of the draft model, that of the one that drafts on from it, and so on."""
        return () if self.drafter is None else (self.drafter, *self.drafter.drafters)

    def load_model(self, stage: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        """Load program and weights, and meet other ranks, which is under way meanwhile."""
        check_weights_fit(self._source.weight_bytes, self.config.runtime, self.device)
        for drafter in self.drafters:
            drafter._source.begin(self.device)
        try:
            model = self._source.load(self.device)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the weights ({self._source.weight_bytes / 2**30:.2f} GiB) did not fit on {self.device}: {error}"
            ) from error
        self.model = model
        self.kv_arena = arena_on(self.device) if self.config.runtime.enable_sleep_mode else None
        self._overlap: BatchOverlap | None = None
        if self._meet is not None:
            with stage("meet ranks"):
                self.communicator = self._meet()
                self.communicator.use_kernels(model.kernels, in_one_order=self.config.runtime.deterministic)
            if isinstance(self.communicator, StagedCommunicator) and model.stage is not None:
                most_tokens = self.config.runtime.max_num_batched_tokens
                self.pipeline = Pipeline(self.communicator, model.stage, most_tokens, self.device)
            if self.config.runtime.enable_dbo:
                self._overlap = self._make_overlap(self.communicator)
        interval_s = self.config.forward_times_interval_s
        self.forward_times = ForwardTimes(interval_s, self.device) if interval_s > 0 else None
        self.expert_counts: dict[str, torch.Tensor] | None = None
        if self.config.runtime.expert_stats:
            self.expert_counts = {
                name: torch.zeros(count, dtype=torch.int64, device=self.device)
                for name, count in model.num_experts.items()
            }
        self.expert_routes: RoutePool | None = None
        if self.config.runtime.routed_experts:
            page_size = self.config.runtime.page_size
            self.expert_routes = RoutePool(model.num_experts, page_size, self.device, self.kv_arena)
        self.program = ProgramRunner(
            model,
            self.config,
            self.device,
            self.communicator,
            forward_times=self.forward_times,
            expert_counts=self.expert_counts,
            expert_routes=self.expert_routes,
            pipeline=self.pipeline,
        )
        if self.drafter is not None:
            self.drafter.device = self.device
            self.drafter.load_model(stage)

    def init_memory_pool(self) -> None:
        """Allocate rows of requests, and as many KV pages as fit; config.num_pages overrules the measurement."""
        self.make_rows()
        num_pages = count_pages(self) if self.config.num_pages is None else self.config.num_pages
        self.take_pages(num_pages)
        self.max_total_num_tokens = (num_pages - 1) * self.config.runtime.page_size

    def _make_overlap(self, communicator: Communicator) -> BatchOverlap:
        """
        Raises:
            UnsupportedModelError: the model's steps are not divided.
        """
        check_divides(self.model.state_layers)  # a model that was compiled for halves has passed
        executor = self.model.executor
        if not isinstance(executor, ProgramExecutor):
            raise TypeError(f"expected a program, which alone is cut over ranks, got {type(executor).__name__}")
        most_tokens = most_of_a_part(self.config.runtime.max_num_batched_tokens)
        most_bytes = most_tokens * self.model.hidden_size * self.config.dtype.itemsize
        return BatchOverlap(executor, communicator, most_bytes, self.device)

    @property
    def always_takes_features(self) -> bool:
        """True if all steps run the program that takes features: in deterministic mode numbers may not depend on a
        choice between two programs."""
        return self.config.runtime.deterministic and self.model.media is not None

    @property
    def always_takes_adapters(self) -> bool:
        """Likewise of the program for adapters, whose linears leave norms and residuals to other kernels."""
        return self.config.runtime.deterministic and self.model.lora is not None

    @property
    def divides_steps(self) -> bool:
        """True if a large step may run in two halves beside each other."""
        return self._overlap is not None

    def init_attention_backend(self) -> None:
        """Make the backend that batches are planned with, and one for the second halves of those that are divided."""
        pools = self.req_to_token_pool, self.state_pool
        live = self.model.live
        make = partial(
            make_backend,
            self.config,
            self.model,
            *pools,
            self.device,
            weights=() if live is None else live.tensors.values(),
            short_prompts=self.model.sources is not None,  # a decoder's
        )
        self.attn_backend: AttentionBackend = make()
        self.source_attention: SourceAttention | None = None
        if self.model.sources is not None:
            self.source_attention = SourceAttention(self.config, self.model, self.req_to_token_pool, self.device)
        self.image_attention: ImageAttention | None = None
        if self.model.images is not None:
            self.image_attention = ImageAttention(self.config, self.model, self.req_to_token_pool, self.device)
        if self._overlap is not None:
            self._overlap.second_backend = make(part=1)

    def init_cuda_graphs(self) -> None:
        """Capture graphs; skipped off CUDA, when disabled, and for models that do not generate."""
        if not self.captures_graphs:
            return
        from mllm_compile.runtime.cuda_graph.draft_chain import chain_of

        self.draft_chain = chain_of(self.drafter)
        fault = self._capture_graphs()
        if fault is not None and self.draft_chain is not None:
            logger.warning("drafts are made beside verify steps: %s. Please report this.", fault)
            self.draft_chain = None
            fault = self._capture_graphs()
        if fault is not None:
            logger.warning("verify steps run piece by piece: %s. Please report this.", fault)

    def _capture_graphs(self) -> str | None:
        """Captures graphs, without verify steps where these are wrong; then says what is."""
        from mllm_compile.runtime.cuda_graph.graph_runner import GraphRunner
        from mllm_compile.runtime.cuda_graph.kinds import dispatcher_of

        self.graph_runner = GraphRunner(self, dispatcher_of(self), self.config.debug_graphs)
        try:
            self.graph_runner.capture()
        except RuntimeError as error:
            if self.draft_chain is None:
                raise
            return f"their passes are not captured ({error})"
        return self.graph_runner.check_verifies()

    @property
    def captures_graphs(self) -> bool:
        """True if steps are captured: on CUDA, of a model that generates, unless they are disabled."""
        return self.device.type == "cuda" and self.config.cudagraph.mode != "none" and self.is_generation

    def shutdown(self) -> None:
        """Give all memory back, as far as the device answers; the runner cannot be used any more."""
        if self.device.type == "cuda":
            # Torch does not know what graphs read: without this it might give that memory away while one still runs.
            with suppress(RuntimeError):
                torch.cuda.synchronize(self.device)
        if self.drafter is not None:
            self.drafter.shutdown()
        # Whatever part of it is there: a failed initialize ends here too.
        pools = ("req_to_token_pool", "row_state", "state_pool", "feature_pool", "token_to_kv_pool")
        for name in ("model", "program", "attn_backend", "source_attention", "image_attention", "_overlap", *pools):
            self.__dict__.pop(name, None)
        self.graph_runner = None
        gc.collect()
        if self.device.type == "cuda":
            # cuBLAS keeps a workspace for each stream that it has run on: 32 MiB each on Hopper, captures' too.
            with suppress(RuntimeError):
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()

    def experts_chosen(self) -> dict[str, list[int]]:
        """How often each expert of each layer was chosen since the start. Waits for the device."""
        return {name: counts.tolist() for name, counts in (self.expert_counts or {}).items()}

    # Running ----------------------------------------------------------------------------------------------------------

    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run the model on a batch. Launches without waiting for the device."""
        self.forward_pass_id += 1
        if batch.forward_mode.is_idle() and batch.dp_metadata is None:
            return LogitsProcessorOutput(torch.empty(0, self.vocab_size, dtype=self.config.dtype, device=self.device))
        if batch.pixel_values is not None and batch.image_grid_thw is not None and batch.media is None:
            self.image_encoder().take_images(batch, batch.pixel_values, batch.image_grid_thw)
        return self.forward_decode(batch) if batch.forward_mode.is_decode_or_idle() else self.forward_extend(batch)

    def reads_pages(self, batch: ForwardBatch) -> bool:
        """False: `forward` of the batch reads nothing of the table of slots, which may be written after its launch."""
        is_all_read = self._overlap is not None or self.model.sources is not None or batch.seen_images is not None
        return is_all_read or self.attn_backend.reads_pages(batch)

    def forward_decode(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run a DECODE: every row's logits are wanted, unless logits_indices say otherwise."""
        return self._run(batch)

    def forward_extend(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run EXTEND and MIXED: the logits of each request's last token, unless logits_indices say otherwise."""
        if batch.logits_indices is None:
            ends = batch.extend_start_loc + batch.extend_seq_lens  # type: ignore[operator]  # set in EXTEND and MIXED
            batch.logits_indices = ends.long() - 1
        return self._run(batch)

    def _run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        if self._overlap is not None and batch.logits_indices is not None:
            slices = ubatch_slices(batch, self.config.runtime.dbo_prefill_token_threshold)
            if slices is not None:
                return self._run_parts(batch, batch.logits_indices, slices, self._overlap)
        has_features = batch.media is not None and not self.always_takes_features
        is_captured = self.graph_runner is not None and not has_features and batch.seen_images is None
        output = self.graph_runner.run(batch) if is_captured else None  # type: ignore[union-attr]
        return self.run_eager(batch) if output is None else output

    def sample(
        self,
        logits_output: LogitsProcessorOutput,
        forward_batch: ForwardBatch,
        temperatures: torch.Tensor,
        top_ps: torch.Tensor | None = None,
        top_ks: torch.Tensor | None = None,
        penalty_params: PenaltyParams | None = None,
    ) -> torch.Tensor:
        """Next tokens [R] int32 from parameters given as tensors, drawn at each request's position.

        The engine's steps use the Sampler, which keeps parameters and counts per row on the device.
        """
        logits = logits_output.next_token_logits
        positions = forward_batch.seq_lens.long()
        return sample_tokens(
            logits, temperatures, top_ps, top_ks, penalty_params, positions=positions, pieces=self.model.sampling
        )

    def top_logprobs(
        self, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch
    ) -> list[list[tuple[int, float]]]:
        """The likeliest next tokens of each request with their log-probabilities, the likeliest first: as many as the
        batch's top_logprobs_nums say. Waits for the device.

        Raises:
            RequestError: the batch has none.
        """
        nums, logits = forward_batch.top_logprobs_nums, logits_output.next_token_logits
        if nums is None or len(nums) != logits.shape[0]:
            raise RequestError(
                f"top_logprobs_nums is {nums}; expected a number for each of {logits.shape[0]} rows of logits. "
                "Give it to prepare_forward_batch_extend or prepare_forward_batch_decode."
            )
        any_token = torch.zeros(len(nums), dtype=torch.int64, device=logits.device)
        found = token_logprobs(logits, any_token, max(nums, default=0), pieces=self.model.sampling)
        rows = zip(found.top_token_ids.tolist(), found.top_logprobs.tolist(), nums, strict=True)
        return [list(zip(ids[:num], logprobs[:num], strict=True)) for ids, logprobs, num in rows]

    def plan_attention(self, batch: ForwardBatch) -> None:
        """Plans a batch that attention is launched for: to its own tokens, and to its sources."""
        self.attn_backend.init_forward_metadata(batch)
        if self.source_attention is not None:
            batch.of_sources = self.source_attention.plan(batch)
        if self.image_attention is not None and batch.seen_images is not None:
            batch.of_sources = self.image_attention.plan(batch, batch.seen_images)

    def run_eager(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Runs the program piece by piece, without a graph."""
        if self.step_threads is not None:
            self.step_threads.use(batch.forward_mode.is_decode_or_idle())
        self.plan_attention(batch)
        if self.model.rope is not None and batch.rope_lens is None:
            batch.rope_lens = torch.zeros_like(batch.positions)
        if self.model.reads_hidden_states and batch.hidden_states is None:
            batch.hidden_states = batch.input_ids.new_zeros(
                (batch.num_tokens, self.model.hidden_size), dtype=self.config.dtype
            )
        logits_indices = batch.logits_indices
        if logits_indices is None:
            logits_indices = torch.arange(batch.batch_size, device=self.device)
        tokens = TokenInputs.of(batch)
        if self.dp_size > 1:
            tokens = self._with_those_of_others(tokens, batch.dp_metadata)
        return self.program.run(batch, tokens, logits_indices)

    def _run_parts(
        self,
        batch: ForwardBatch,
        rows: torch.Tensor,
        slices: tuple[UBatchSlice, UBatchSlice],
        overlap: BatchOverlap,
    ) -> LogitsProcessorOutput:
        """Runs a step in two overlapping parts; `rows` [S] int64 are the rows that get logits."""
        if self.model.rope is not None and batch.rope_lens is None:
            batch.rope_lens = torch.zeros_like(batch.positions)
        backends = overlap.backends(self.attn_backend)
        parts = [ubatch_of(batch, one, backend) for one, backend in zip(slices, backends, strict=True)]
        for part in parts:
            part.attn_backend.init_forward_metadata(part)
        inputs = [TokenInputs.of(part).by_name for part in parts]
        with self.program.context(batch, TokenInputs.of(batch)) as whole:
            contexts = [self.program.context_of_part(part, whole) for part in parts]
            bodies = overlap.bodies(inputs, contexts, share_a_request(slices))
            logits_of = partial(overlap.heads, bodies, slices[1].token_slice.start)
            logits, hidden_states = logits_of(rows), overlap.hidden_states(bodies, inputs)
        return LogitsProcessorOutput(logits, hidden_states, logits_of if batch.return_logprob else None)

    def _with_those_of_others(self, tokens: TokenInputs, across: DPMetadata | None) -> TokenInputs:
        """Pads the inputs to the largest rank's token count, and marks the real tokens of all ranks.

        Without metadata every token is real.
        """
        if across is not None:
            tokens = tokens.padded(across.max_tokens_across_dp)
        slots = torch.ones(self.dp_size * tokens.input_ids.shape[0], dtype=torch.int64, device=self.device)
        if across is not None:
            across.mark_tokens(slots)
        return replace(tokens, all_slots=slots)

    def image_encoder(self) -> ImageEncoder:
        """Makes the model's tower ready to run.

        Raises:
            RequestError: it has none.
        """
        if self.model.media is None:
            raise RequestError("a batch brings images, and the model takes none. Leave `pixel_values` out of it.")
        return ImageEncoder(self.model.media, self.config.dtype, self.device)

    def keep_states(self, counts: torch.Tensor) -> None:
        """Takes the states of a verify step's requests on by the tokens that hold, `counts` [Q] int64 of each sampled
        request, which rank 0 knows. Does nothing for a model that has attention alone."""
        if isinstance(self.attn_backend, HybridAttnBackend):
            self.broadcast(counts)
            self.attn_backend.keep_states(counts)

    def sleeping_memory(self) -> SleepingMemory:
        """The memory that can be given back in place."""
        runners = (self, *self.drafters)
        kv_cache = [one.kv_arena for one in runners if one.kv_arena is not None]
        kept = [one.model.arena for one in self.drafters if one.model.arena is not None]
        return SleepingMemory(self.device, self.model.arena, kept, kv_cache)
