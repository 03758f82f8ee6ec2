"""MIXED: one graph for any step, decodes and prompts, up to its head."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext

from mllm_compile.runtime.attention.capture import needed
from mllm_compile.runtime.cuda_graph.kind import BatchGraphs, BodyGraph, GraphSetting, capture_body
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.padding import PaddedBatch
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_batch import ForwardBatch, LogitsProcessorOutput
from mllm_compile.runtime.graph_mode import BatchDescriptor, GraphKind

logger = logging.getLogger(__name__)


class MixedGraphs(BatchGraphs):
    """See the module's header."""

    def __init__(self, setting: GraphSetting) -> None:
        super().__init__(setting)
        self._attention = needed(setting.runner.attn_backend.mixed)
        self._graphs: dict[tuple[int, bool], BodyGraph] = {}  # by tokens, and whether some have an adapter

    @staticmethod
    def sizes(runner: CapturableModel, kind: GraphKind) -> Sequence[int]:
        """The sizes of the config, unless attention or ranks cannot be captured so.

        Raises:
            ConfigError: a user asks for them all the same.
        """
        graphs = runner.config.cudagraph
        if not graphs.mixed_tokens:
            return ()
        obstacle = runner.attn_backend.mixed_obstacle
        if runner.model.sources is not None:
            obstacle = "tokens of prompts attend to their sources too"
        if runner.dp_size > 1:
            obstacle = "ranks with requests of their own have a kind of step each"
        if obstacle is None:
            return graphs.mixed_tokens
        if graphs.mixed_tokens_asked:
            raise ConfigError(
                f"cudagraph.mixed_tokens is {list(graphs.mixed_tokens)}, but steps with prompts cannot be captured "
                f"whole: {obstacle}. Set it to auto or []."
            )
        logger.info("steps with prompts are not captured whole: %s", obstacle)
        return ()

    def capture(self, descriptor: BatchDescriptor) -> None:
        size, attention = descriptor.num_tokens, self._attention
        attention.init_forward_metadata_capture_mixed(size)

        def begin() -> None:
            attention.begin_captured_mixed(size, self._padded.inputs.req_pool_indices)

        is_first = not any(has_lora == descriptor.has_lora for _, has_lora in self._graphs)
        self._graphs[size, descriptor.has_lora] = capture_body(self._setting, descriptor, begin, is_first)

    def serves(self, batch: ForwardBatch) -> bool:
        return self._attention.runs_well_captured(batch)

    def padded_batch(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> PaddedBatch:
        return self._prepared(batch, descriptor).padded

    def replay(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> LogitsProcessorOutput:
        entry, times = self._prepared(batch, descriptor), self._runner.forward_times
        with nullcontext() if times is None else times.measure(descriptor.num_tokens):
            entry.graph.replay()
            return self._runner.program.head(batch, entry.body, self._padded.rows_of(batch))

    def _prepared(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> BodyGraph:
        size, inputs = descriptor.num_tokens, self._padded.inputs
        self._padded.take_tokens(batch, size)
        inputs.take_requests(batch, min(size, inputs.max_requests))
        self._attention.init_forward_metadata_replay_mixed(size, batch)
        return self._graphs[size, descriptor.has_lora]
