"""Runs the model on batches whose attention is planned: inside a forward context, up to the head, and the head.

../model_runner.py plans a batch and decides how it is run. A step piece by piece, one of pieces in graphs, and what a
whole graph captures are runs of this one kind.

Shape legend: T tokens, S rows of logits, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mllm_compile.runtime.attention.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from mllm_compile.runtime.collectives.base import Communicator, leaving_parts
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_batch import ForwardBatch, LogitsProcessorOutput, TokenInputs
from mllm_compile.runtime.forward_context import BatchDescriptor, ForwardContext, ForwardTimes, set_forward_context
from mllm_compile.runtime.graph_mode import CUDAGraphMode
from mllm_compile.runtime.memory_pool import RoutePool
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.loaded import Executor, LoadedModel
from mllm_compile.runtime.program.pipeline import Pipeline
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.runtime.state.metadata import StateMetadataBuilder


class ProgramRunner:
    """Runs a loaded model's program, or the eager model in its place.

    Attributes:
        layers: name → layer, of those with attention and those with a state.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: RunnerConfig,
        device: torch.device,
        communicator: Communicator | None = None,
        *,
        forward_times: ForwardTimes | None = None,
        expert_counts: Mapping[str, torch.Tensor] | None = None,
        expert_routes: RoutePool | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """
        Args:
            communicator: the rank's, if the model is cut over several.
            pipeline: the rank's place in a pipeline, if the model is a stage of one.
            forward_times: takes the times of runs.
            expert_counts: layer of experts → [E] int64, where choices are counted.
            expert_routes: where choices are kept.
        """
        self._model = model
        self._config = config
        self._communicator, self._pipeline = communicator, pipeline
        self._forward_times = forward_times
        self._expert_counts, self._expert_routes = expert_counts, expert_routes
        self._dp_size = config.runtime.expert_parallel_size
        self.layers: dict[str, Any] = {layer.name: layer for layer in model.layers}
        self.layers |= {layer.name: layer for layer in model.state_layers}
        seen = model.images if model.sources is None else model.sources
        of_sources = () if seen is None else seen.layers
        self._source_layers = [layer.name for layer in of_sources]
        self.layers |= {layer.name: layer for layer in of_sources}
        spec = KVCacheSpec(model.layers, config.runtime.page_size)
        self._metadata_builder = AttentionMetadataBuilder(spec)
        rank = communicator.rank if self._dp_size > 1 and communicator is not None else 0
        first_row = rank * config.runtime.max_running_requests
        self._state_metadata_builder = StateMetadataBuilder(model.state_layers, config, first_row)
        executors = (model.executor, None if model.lora is None else model.lora.executor)
        programs = [one for one in executors if isinstance(one, ProgramExecutor)]
        if self._dp_size > 1:
            # Layers' outputs for padding go into experts, and as keys into the dummy page: they must be finite.
            for program in programs:
                program.set_output_buffers(_zeros)
        elif device.type == "cpu" and not config.runtime.enable_dbo:
            # Halves of a step, which take turns, would write over each other.
            kept = _Kept()
            for program in programs:
                program.set_output_buffers(kept)

    def run(
        self,
        batch: ForwardBatch,
        tokens: TokenInputs,
        logits_indices: torch.Tensor,
        mode: CUDAGraphMode = CUDAGraphMode.NONE,
        descriptor: BatchDescriptor | None = None,
        all_rows: torch.Tensor | None = None,
    ) -> LogitsProcessorOutput:
        """Runs the program on a batch whose attention is planned.

        Args:
            batch: attention's input.
            tokens: the pieces' input; padded where a graph wants it, when `batch` is not.
            logits_indices: [S] int64.
            mode, descriptor: of the graphs that are captured or replayed.
            all_rows: as an executor's body takes it.
        """
        with self.context(batch, tokens, mode, descriptor):
            if self._pipeline is not None:
                return self._run_stage(self._pipeline, batch, tokens, logits_indices, all_rows)
            body = self._executor_of(batch).body(tokens.by_name, all_rows)
            return self.head(batch, body, logits_indices)

    def _run_stage(
        self,
        pipeline: Pipeline,
        batch: ForwardBatch,
        tokens: TokenInputs,
        logits_indices: torch.Tensor,
        all_rows: torch.Tensor | None,
    ) -> LogitsProcessorOutput:
        """Runs a stage between those before and behind it; all but the last give no logits."""
        executor: Any = self._executor_of(batch)
        body = executor.body({**tokens.by_name, **pipeline.take(tokens.input_ids.shape[0])}, all_rows)
        if pipeline.is_last:
            return self.head(batch, body, logits_indices)
        pipeline.give(executor.outputs(body))
        vocab_size, device = self._model.vocab_size, tokens.input_ids.device
        return LogitsProcessorOutput(torch.empty(0, vocab_size, dtype=self._config.dtype, device=device))

    def body(
        self,
        batch: ForwardBatch,
        tokens: TokenInputs,
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
        all_rows: torch.Tensor,
    ) -> list[Any]:
        """Runs the program up to the head, for `head`; arguments as `run`."""
        with self.context(batch, tokens, mode, descriptor):
            values: list[Any] = self._executor_of(batch).body(tokens.by_name, all_rows)
            return values

    def head(self, batch: ForwardBatch, body: list[Any], logits_indices: torch.Tensor) -> LogitsProcessorOutput:
        """Logits of the tokens `logits_indices` [S] int64, and where the batch asks for them of any others; and hidden
        states, where a drafter reads them.

        Ranks with requests of their own get all ranks' logits, S each.
        """
        executor = self._executor_of(batch)
        logits_of = partial(self._logits_of_all, executor, body) if batch.return_logprob else None
        hidden_states = executor.hidden_states(body, batch.num_tokens)
        if batch.greedy_across_ranks and self._communicator is not None and self._dp_size == 1:
            with leaving_parts() as parts:
                logits = executor.head(body, logits_indices)
            is_partial_vocab = len(parts) == 1
            return LogitsProcessorOutput(
                parts[0] if is_partial_vocab else logits, hidden_states, logits_of, is_partial_vocab=is_partial_vocab
            )
        return LogitsProcessorOutput(
            self._logits_of_all(executor, body, logits_indices), hidden_states, logits_of=logits_of
        )

    def context(
        self,
        batch: ForwardBatch,
        tokens: TokenInputs,
        mode: CUDAGraphMode = CUDAGraphMode.NONE,
        descriptor: BatchDescriptor | None = None,
    ) -> AbstractContextManager[ForwardContext]:
        """The forward context of a run; arguments as `run`."""
        attention = self._metadata_builder.build(batch.common_prefix_len, CommonAttentionMetadata.of(batch))
        if batch.of_sources is not None:
            of_sources = AttentionMetadata(batch=batch.of_sources, num_actual_tokens=batch.num_tokens)
            attention |= dict.fromkeys(self._source_layers, of_sources)
        is_mixed = mode is CUDAGraphMode.FULL and descriptor is not None and not descriptor.uniform
        states = self._state_metadata_builder.build(CommonAttentionMetadata.of(batch), is_mixed)
        return set_forward_context(
            {**attention, **states},
            no_compile_layers=self.layers,
            slot_mapping=dict.fromkeys(attention, tokens.out_cache_loc),
            num_tokens=tokens.input_ids.shape[0],
            cudagraph_runtime_mode=mode,
            batch_descriptor=descriptor,
            dp_metadata=batch.dp_metadata,
            deterministic=self._config.runtime.deterministic,
            expert_counts=self._expert_counts,
            expert_routes=self._expert_routes,
            # A whole step in a graph is timed where it is replayed: a capture cannot wait for the device.
            forward_times=None if mode is CUDAGraphMode.FULL else self._forward_times,
        )

    def context_of_part(self, part: ForwardBatch, whole: ForwardContext) -> ForwardContext:
        """The forward context of a part of a step that is divided; `whole` is the step's."""
        attention = self._metadata_builder.build(part.common_prefix_len, CommonAttentionMetadata.of(part))
        slots = dict.fromkeys(attention, part.out_cache_loc)
        return replace(whole, attn_metadata=attention, slot_mapping=slots)

    def _logits_of_all(self, executor: Executor, body: list[Any], logits_indices: torch.Tensor) -> torch.Tensor:
        """The head's logits; ranks with requests of their own get a block of each rank."""
        logits = executor.head(body, logits_indices)
        if self._dp_size == 1 or self._communicator is None:
            return logits
        return self._communicator.all_gather(logits.contiguous()).flatten(0, 1)

    def _executor_of(self, batch: ForwardBatch) -> Executor:
        """The executor of a batch.

        Raises:
            ConfigError: the eager model is asked for, and the source loaded none.
        """
        if batch.adapter_slots is not None:
            return self._executor_of_adapters(has_features=batch.media is not None)
        if batch.media is not None and self._model.media is not None:
            return self._model.media.with_features
        if batch.seen_images is not None and self._model.images is not None:
            return self._model.images.text
        if not self._config.runtime.skip_compiled:
            return self._model.executor
        if self._model.eager is None:
            raise ConfigError("runtime.skip_compiled is set, but the model's source has no eager model to run")
        return self._model.eager

    def _executor_of_adapters(self, has_features: bool) -> Executor:
        lora = self._model.lora
        if lora is None:
            raise ConfigError("a request has an adapter, and the model was compiled without the section lora")
        return lora.with_features if has_features and lora.with_features is not None else lora.executor


class _Kept:
    """Outputs of layers between pieces, as OutputBuffers gives them: the last step's, where they fit.

    An allocation for each layer takes a CPU 5 % of a small model's decode: its code and lists are out of the caches,
    through which the weights go.
    """

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def __call__(self, index: int, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        kept = self._kept.get(index)
        if kept is None or kept.dtype is not dtype or kept.shape != (like.shape[0], *shape):
            kept = self._kept[index] = like.new_empty((like.shape[0], *shape), dtype=dtype)
        return kept


def _zeros(index: int, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Outputs of layers between pieces, as OutputBuffers gives them."""
    return like.new_zeros((like.shape[0], *shape), dtype=dtype)
