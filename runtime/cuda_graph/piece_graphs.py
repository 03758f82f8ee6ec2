"""PIECEWISE: replays a graph per padded token count for each piece call; attention runs between them as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mllm_compile.runtime.cuda_graph.capture import GraphCapturer, WeakTensor
from mllm_compile.runtime.cuda_graph.dispatcher import asked_sizes
from mllm_compile.runtime.cuda_graph.kind import BatchGraphs, GraphSetting
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.padding import PaddedBatch
from mllm_compile.runtime.forward_batch import ForwardBatch, LogitsProcessorOutput
from mllm_compile.runtime.forward_context import get_forward_context, is_forward_context_available
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, GraphKind
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.linked_steps import PieceFunction


class PiecewiseGraphs(BatchGraphs):
    """The pieces of a program in graphs."""

    def __init__(self, setting: GraphSetting) -> None:
        super().__init__(setting)
        self._has_run: set[bool] = set()  # with adapters, and without
        for executor in (setting.executor, setting.of_lora):
            if executor is not None:
                _capture_pieces(executor, setting)

    @staticmethod
    def sizes(runner: CapturableModel, kind: GraphKind) -> Sequence[int]:
        graphs = runner.config.cudagraph
        return asked_sizes("cudagraph.piecewise_tokens", graphs.piecewise_tokens, graphs.mode)

    def capture(self, descriptor: BatchDescriptor) -> None:
        """Runs prompts of padding through the program; its pieces capture themselves on the way."""
        batch = self._padded.prompts(descriptor.num_tokens, descriptor.has_lora)
        batch.logits_indices = torch.zeros(1, dtype=torch.int64, device=self._runner.device)
        if descriptor.has_lora not in self._has_run:
            self._runner.run_eager(batch)
            self._has_run.add(descriptor.has_lora)
        self._run(self._planned(batch, descriptor), descriptor)

    def padded_batch(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> PaddedBatch:
        """The batch itself, with padded tokens: attention is launched as it is."""
        size = descriptor.num_tokens
        if batch.dp_metadata is not None:
            self._padded.mark_tokens(batch.dp_metadata, size)
        self._padded.take_tokens(batch, size)
        return self._planned(batch, descriptor)

    def replay(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> LogitsProcessorOutput:
        return self._run(self.padded_batch(batch, descriptor), descriptor)

    def _planned(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> PaddedBatch:
        size = descriptor.num_tokens
        self._runner.plan_attention(batch)
        return PaddedBatch(batch, self._padded.tokens(size, descriptor.has_lora), self._padded.all_rows(size))

    def _run(self, padded: PaddedBatch, descriptor: BatchDescriptor) -> LogitsProcessorOutput:
        batch, tokens, all_rows = padded
        rows = self._padded.rows_of(batch)
        return self._runner.program.run(batch, tokens, rows, CUDAGraphMode.PIECEWISE, descriptor, all_rows)


def _capture_pieces(executor: ProgramExecutor, setting: GraphSetting) -> None:
    """Puts graphs in the place of a program's pieces, but those of rows."""
    executor.wrap_pieces(
        lambda piece, index, function: (
            function if executor.is_row_piece(index) else PieceGraphs(function, setting.capturer, setting.debug)
        )
    )


@dataclass(slots=True)
class _Entry:
    graph: torch.cuda.CUDAGraph
    outputs: list[torch.Tensor]  # non-owning
    input_addresses: tuple[int, ...] | None  # kept in debug mode only


class PieceGraphs:
    """One call of a piece: replays the graph of the context's descriptor, captures it once, or runs through.

    Holds no buffers. While a size is captured the executor holds the outputs exactly as long as the program needs them,
    so the pool can reuse the rest; for replays only their places are kept.
    """

    def __init__(self, function: PieceFunction, capturer: GraphCapturer, debug: bool) -> None:
        self._function = function
        self._capturer = capturer
        self._debug = debug
        self._entries: dict[BatchDescriptor, _Entry] = {}

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        # Without a context further logits are asked for of a batch that has run.
        context = get_forward_context() if is_forward_context_available() else None
        if context is None or context.cudagraph_runtime_mode is not CUDAGraphMode.PIECEWISE:
            return self._function(inputs)
        descriptor = context.batch_descriptor
        if descriptor is None:
            raise RuntimeError("PIECEWISE needs a batch descriptor in the forward context")
        entry = self._entries.get(descriptor)
        if entry is None:
            return self._capture(descriptor, inputs)
        if entry.input_addresses is not None and entry.input_addresses != _addresses(inputs):
            raise RuntimeError(f"an input of a captured piece has moved since {descriptor} was captured")
        entry.graph.replay()
        return entry.outputs

    def _capture(self, descriptor: BatchDescriptor, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if torch.cuda.current_stream() != self._capturer.stream:
            raise RuntimeError(f"no graph of {descriptor} was captured before serving began")
        addresses = _addresses(inputs) if self._debug else None
        graph, outputs = self._capturer.capture(lambda: self._function(inputs))
        weak = [WeakTensor(output).tensor() for output in outputs]
        self._entries[descriptor] = _Entry(graph, weak, addresses)
        return outputs


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
