"""CUDA graphs of packed texts: one for a number of tokens, whatever the texts' lengths are.

Attention is told where the text of each row begins and ends. That is in device memory beside the token ids, and a
replay brings all by one copy. Rows of padding are texts of their own.

Shape legend: T tokens, W width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.cuda_graph.capture import GraphCapturer, WeakTensor
from mllm_compile.runtime.cuda_graph.dispatcher import next_size
from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.graph_mode import GraphKind
from mllm_compile.runtime.program.linked_steps import Segments
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import PackedAttentionStep

# Rows of what a step is given, [5, T] int64.
IDS, POSITIONS, KINDS, STARTS, ENDS = range(5)
_GIVEN = 5


def step_rows(
    ids: np.ndarray, lengths: np.ndarray, bounds: np.ndarray, kinds: np.ndarray | None, size: int
) -> np.ndarray:
    """The rows [5, size] int64 that a step of T tokens is given, with padding behind.

    Args:
        ids, kinds: [T] int64.
        lengths: of texts; bounds: where they begin, and T.
    """
    count = len(ids)
    rows = np.zeros((_GIVEN, size), dtype=np.int64)
    starts = np.repeat(bounds[:-1], lengths)
    rows[IDS, :count] = ids
    rows[POSITIONS, :count] = np.arange(count) - starts
    if kinds is not None:
        rows[KINDS, :count] = kinds
    rows[STARTS, :count], rows[ENDS, :count] = starts, np.repeat(bounds[1:], lengths)
    rows[STARTS, count:] = np.arange(count, size)
    rows[ENDS, count:] = np.arange(count + 1, size + 1)
    return rows


def body_inputs(rows: torch.Tensor, segments: Segments, has_kinds: bool) -> dict[str, Any]:
    """The inputs of a program of texts, of what step_rows gives, on the device."""
    inputs = {"input_ids": rows[IDS], "positions": rows[POSITIONS], "cu_seqlens": segments}
    return inputs | ({"kinds": rows[KINDS]} if has_kinds else {})


def can_capture(program: Program) -> bool:
    """True if all attention of the program is by pieces that a graph can hold."""
    attention = [step for step in program.steps if isinstance(step, PackedAttentionStep)]
    return bool(attention) and all(step.of_texts is not None for step in attention)


class TextGraphs:
    """The graphs of one model, captured when this is made.

    Args:
        body: the model's executor.
        sizes: T of each, ascending.

    Raises:
        DeviceMemoryError: they do not fit.
    """

    def __init__(self, body: Any, sizes: Sequence[int], has_kinds: bool, device: torch.device) -> None:
        self._body, self._sizes, self._has_kinds = body, tuple(sizes), has_kinds
        self._capturer = GraphCapturer(device)
        self._given = torch.zeros(_GIVEN * max(sizes), dtype=torch.int64, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, WeakTensor | torch.Tensor]] = {}
        try:
            with self._capturer.session():
                for size in reversed(self._sizes):  # smaller ones lie in what the largest took
                    with self._capturer.measured(GraphKind.PIECEWISE, size):
                        self._graphs[size] = self._capture(size)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"CUDA graphs of steps of up to {max(sizes):,} tokens do not fit into the device's memory ({error}). "
                "Give smaller cudagraph.piecewise_tokens, or set cudagraph.mode: none."
            ) from error

    @property
    def seconds(self) -> float:
        """Seconds of all captures."""
        return sum(figure.seconds for figure in self._capturer.figures)

    @property
    def mib(self) -> float:
        """Device memory of all."""
        return sum(figure.mib for figure in self._capturer.figures)

    def size_for(self, num_tokens: int) -> int | None:
        """The tokens of the graph that serves a step; None: none does."""
        return next_size(self._sizes, num_tokens)

    def replay(self, rows: np.ndarray) -> torch.Tensor:
        """The hidden states [size, W] of what step_rows gave for a size of the graphs; until the next replay."""
        size = rows.shape[1]
        self._rows(size).copy_(_staged(rows, self._given.is_cuda), non_blocking=True)
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden.tensor() if isinstance(hidden, WeakTensor) else hidden

    def _rows(self, size: int) -> torch.Tensor:
        return self._given[: _GIVEN * size].view(_GIVEN, size)

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, WeakTensor | torch.Tensor]:
        rows = self._rows(size)
        padding = step_rows(*(np.zeros(0, np.int64),) * 2, np.zeros(1, np.int64), None, size)
        rows.copy_(torch.from_numpy(padding))
        segments = Segments(rows[STARTS], size, rows[STARTS : ENDS + 1], is_captured=True)
        inputs = body_inputs(rows, segments, self._has_kinds)
        self._body.run_tower(inputs)  # what is loaded or tuned at a first call
        graph, (hidden, *_) = self._capturer.capture(lambda: self._body.run_tower(inputs))
        return graph, WeakTensor(hidden) if hidden.is_cuda else hidden


def _staged(rows: np.ndarray, is_pinned: bool) -> torch.Tensor:
    source = torch.from_numpy(rows)
    return source.pin_memory() if is_pinned else source
