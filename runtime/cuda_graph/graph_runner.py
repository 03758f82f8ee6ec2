"""Captures every size of every kind of graph (kinds.py), then runs batches in those that fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from mllm_compile.runtime.cuda_graph.capture import CaptureFigures, GraphCapturer
from mllm_compile.runtime.cuda_graph.decodes import DecodeGraphs
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.cuda_graph.kind import BatchGraphs, GraphSetting, KindGraphs
from mllm_compile.runtime.cuda_graph.kinds import KINDS
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.padding import LayerOutputs, PaddedInputs
from mllm_compile.runtime.cuda_graph.prompts import PromptGraphs
from mllm_compile.runtime.cuda_graph.step_inputs import StepInputs
from mllm_compile.runtime.cuda_graph.verifies import VerifyGraphs
from mllm_compile.runtime.cuda_graph.verify_check import verify_fault
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_batch import ForwardBatch, LogitsProcessorOutput
from mllm_compile.runtime.graph_mode import GraphKind
from mllm_compile.runtime.program.executor import ProgramExecutor

logger = logging.getLogger(__name__)


class GraphRunner:
    """Captures all sizes of a dispatcher, then runs the batches that fit one.

    Attributes:
        kinds: the captured graphs of each kind that has some.
    """

    def __init__(self, runner: CapturableModel, dispatcher: GraphDispatcher, debug: bool = False) -> None:
        """
        Raises:
            ConfigError: the model is not a compiled program.
        """
        self.dispatcher, self._runner = dispatcher, runner
        self._capturer = GraphCapturer(runner.device)
        self._padded = PaddedInputs(runner, dispatcher)
        model = runner.model
        executor, of_lora = model.executor, None if model.lora is None else model.lora.executor
        if runner.always_takes_features and (media := model.media) is not None:
            executor, of_lora = media.with_features, None if model.lora is None else model.lora.with_features
            self.inputs.take_features(media.facts.feature_width, runner.config.dtype, media.facts.axes)
        if not isinstance(executor, ProgramExecutor):
            raise ConfigError(
                f"CUDA graphs need a compiled program, got {type(executor).__name__}; set cudagraph.mode: none"
            )
        outputs = LayerOutputs(dispatcher.most_tokens, runner.dp_size)
        of_lora = of_lora if isinstance(of_lora, ProgramExecutor) else None
        for one in (executor, of_lora):
            if one is not None:
                one.set_output_buffers(outputs)
        setting = GraphSetting(runner, dispatcher, executor, of_lora, self._capturer, self._padded, debug)
        captured = [kind for kind, sizes in dispatcher.sizes.items() if sizes]
        classes = {KINDS[kind]: None for kind in captured}
        self._graphs = {made: made(setting) for made in classes}
        self.kinds: Mapping[GraphKind, KindGraphs] = {kind: self._graphs[KINDS[kind]] for kind in captured}

    @property
    def inputs(self) -> StepInputs:
        """The graphs' inputs: a step that puts its inputs there spares copying them."""
        return self._padded.inputs

    @property
    def decodes(self) -> DecodeGraphs | None:
        """Captured decodes, or None."""
        found = self.kinds.get(GraphKind.DECODE)
        return found if isinstance(found, DecodeGraphs) else None

    @property
    def verifies(self) -> VerifyGraphs | None:
        """Captured verify steps, or None."""
        found = self.kinds.get(GraphKind.VERIFY)
        return found if isinstance(found, VerifyGraphs) else None

    @property
    def prompts(self) -> PromptGraphs | None:
        """Captured prompts, or None."""
        found = self.kinds.get(GraphKind.PREFILL_NEW, self.kinds.get(GraphKind.PREFILL_CACHED))
        return found if isinstance(found, PromptGraphs) else None

    @property
    def figures(self) -> list[CaptureFigures]:
        """Seconds and MiB of every captured size, in the order of capture."""
        return self._capturer.figures

    @torch.inference_mode()
    def check_verifies(self) -> str | None:
        """Compares verify steps with decodes, and leaves them out where they differ: steps of pieces serve then. Before
        anything is served. Returns what differs."""
        verifies, decodes = self.verifies, self.decodes
        if verifies is None or decodes is None:
            return None
        fault, communicator = verify_fault(self._runner, verifies, decodes), self._runner.communicator
        if communicator is not None and not communicator.least(fault is None):
            fault = fault or "on another rank they differ from decodes"
        if fault is not None:
            self.kinds = {kind: graphs for kind, graphs in self.kinds.items() if graphs is not verifies}
        return fault

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures every size, largest first."""
        with self._capturer.session():
            for descriptor in self.dispatcher.descriptors():
                with self._capturer.measured(descriptor.kind, descriptor.num_tokens):
                    self.kinds[descriptor.kind].capture(descriptor)
        for graphs in self._graphs.values():
            graphs.end_captures()
        seconds = sum(figure.seconds for figure in self.figures)
        mib = sum(figure.mib for figure in self.figures)
        logger.debug("captured %d sizes in %.2f s, %.0f MiB", len(self.figures), seconds, mib)

    def run(self, batch: ForwardBatch) -> LogitsProcessorOutput | None:
        """Runs the batch in a captured graph; None when none fits it."""
        across = batch.dp_metadata  # all ranks run the graph of the one that has most tokens
        num_tokens = batch.num_tokens if across is None else across.max_tokens_across_dp
        is_whole = across is None and not (batch.common_prefix_len or batch.sees_ahead)
        is_decode, has_lora = batch.forward_mode.is_decode_or_idle(), batch.adapter_slots is not None
        for descriptor in self.dispatcher.candidates(num_tokens, is_decode, is_whole, has_lora):
            graphs = self.kinds[descriptor.kind]
            if isinstance(graphs, BatchGraphs) and graphs.serves(batch):
                return graphs.replay(batch, descriptor)
        return None


def estimate_graph_bytes(runner: CapturableModel, dispatcher: GraphDispatcher, num_behind: int = 0) -> int:
    """Device memory that capturing every size of `dispatcher` will take.

    The two largest sizes of each kind are captured and thrown away: the largest pays for the pool, the second shows
    what one more size adds. All kinds of decodes take as much as DECODE.

    Args:
        num_behind: graphs of the model's passes behind another's steps (draft_chain.py); they take as much, too.
    """
    tried = {kind: GraphKind.DECODE if kind.is_decode else kind for kind in GraphKind}
    graphs = GraphRunner(runner, dispatcher.largest(2, [kind for kind, like in tried.items() if kind is like]))
    graphs.capture()
    decodes = [figure.mib for figure in graphs.figures if figure.kind is GraphKind.DECODE]
    total = num_behind * (decodes[-1] if decodes else 0.0)
    for kind, sizes in dispatcher.sizes.items():
        mib = [figure.mib for figure in graphs.figures if figure.kind is tried[kind]]
        captured = mib if kind is tried[kind] else []
        total += sum(captured) + (len(sizes) * len(dispatcher.forms) - len(captured)) * (mib[-1] if mib else 0.0)
    return int(total * 2**20)
