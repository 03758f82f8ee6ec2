"""PIECEWISE: replays a graph per padded token count for each piece call; attention runs between them as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mllm_compile.runtime.cuda_graph.capture import GraphCapturer, WeakTensor
from mllm_compile.runtime.forward_context import BatchDescriptor, get_forward_context, is_forward_context_available
from mllm_compile.runtime.graph_mode import CUDAGraphMode
from mllm_compile.runtime.program.executor import PieceFunction


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
