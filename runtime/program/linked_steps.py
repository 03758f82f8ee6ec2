"""The steps of a program as an executor runs them: values are registers, and each step drops those that die with it.

executor.py makes these of a program's steps (steps.py).

Shape legend: T tokens, N packed rows, H query heads, Dv value head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mllm_compile.runtime.ops.attention.layer_op import (
    attention_with_output,
    cache_inputs,
    cross_attention_with_output,
)
from mllm_compile.runtime.ops.states.run import state_with_output

PieceFunction = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
# (index of the buffer, a tensor [T, …], a token's shape, type) → where a layer writes its output: attention [T, H, Dv].
# Outputs that are alive at the same time have different indices.
OutputBuffers = Callable[[int, torch.Tensor, tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Segments:
    """The bounds of what attends to each other among packed rows.

    Attributes:
        bounds: [segments + 1] int32, on the device.
        longest: rows of the longest segment.
        rows: of texts, [2, N] int64: where the segment of each row begins and ends; None: pieces that attend by them
            are not called.
        is_captured: a CUDA graph that is captured holds for other bounds too: `rows` alone are read.
    """

    bounds: torch.Tensor
    longest: int
    rows: torch.Tensor | None = None
    is_captured: bool = False


@dataclass(slots=True)
class BySize:
    """A piece with variants of its own for few tokens, smallest first."""

    any_size: PieceFunction
    small: list[tuple[int, PieceFunction]]
    input: int
    dim: int

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        size = inputs[self.input].shape[self.dim]
        for max_size, function in self.small:
            if size <= max_size:
                return function(inputs)
        return self.any_size(inputs)


@dataclass(slots=True)
class LinkedPiece:
    """A PieceStep whose values are registers of the executor's list of values."""

    piece: str
    index: int  # of the step
    compiled: PieceFunction
    function: PieceFunction  # compiled, or a wrapper around it
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes_kv_of: str | None  # the layer's name
    may_leave_kv: bool  # in some steps attention writes it instead (ops.cache_inputs)
    dead: tuple[int, ...]  # registers that no later step reads

    def run(self, values: list[Any], output_buffers: OutputBuffers) -> None:
        inputs = [values[register] for register in self.inputs]
        if self.writes_kv_of is not None:
            inputs += cache_inputs(self.writes_kv_of, self.may_leave_kv)
        results = self.function(inputs)
        for register, result in zip(self.outputs, results, strict=True):
            values[register] = result


@dataclass(slots=True)
class LinkedAttention:
    """An AttentionStep, likewise; `rope_inputs` and `index` are what q and k, and the choice of keys, are made of."""

    layer: str
    out_shape: tuple[int, int]
    saves_kv: bool
    buffer_index: int
    q: int
    k: int
    v: int
    out: int
    rope_inputs: tuple[int, ...] | None
    eps: float
    bias: int | None
    index: tuple[int, ...]
    dead: tuple[int, ...]

    def run(self, values: list[Any], output_buffers: OutputBuffers) -> None:
        q = values[self.q]
        out = output_buffers(self.buffer_index, q, self.out_shape, q.dtype)
        rope_inputs = None if self.rope_inputs is None else [values[register] for register in self.rope_inputs]
        bias = None if self.bias is None else values[self.bias]
        k, v = values[self.k], values[self.v]
        index = [values[register] for register in self.index] if self.index else None
        attention_with_output(q, k, v, out, self.layer, self.saves_kv, rope_inputs, self.eps, bias, index)
        values[self.out] = out


@dataclass(slots=True)
class LinkedCrossAttention:
    """A CrossAttentionStep, likewise."""

    layer: str
    out_shape: tuple[int, int]
    buffer_index: int
    q: int
    out: int
    dead: tuple[int, ...]

    def run(self, values: list[Any], output_buffers: OutputBuffers) -> None:
        q = values[self.q]
        out = output_buffers(self.buffer_index, q, self.out_shape, q.dtype)
        cross_attention_with_output(q, out, self.layer)
        values[self.out] = out


@dataclass(slots=True)
class LinkedState:
    """A StateStep, likewise."""

    layer: str
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    buffer_index: int
    operands: tuple[int, ...]
    out: int
    dead: tuple[int, ...]

    def run(self, values: list[Any], output_buffers: OutputBuffers) -> None:
        operands = [values[register] for register in self.operands]
        out = output_buffers(self.buffer_index, operands[0], self.out_shape, self.out_dtype)
        state_with_output(operands, out, self.layer)
        values[self.out] = out


@dataclass(slots=True)
class ByRows:
    """A piece that attends for packed texts, and the strides of q, k and v that it was compiled for."""

    piece: PieceFunction
    strides: tuple[tuple[int, int], ...]

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: torch.Tensor,
        of_scores: Iterable[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        of_rows = [self._as_compiled(x, *strides) for x, strides in zip((q, k, v), self.strides, strict=True)]
        self.piece([*of_rows, rows[0], rows[1], *(one.contiguous() for one in of_scores), out])

    def _as_compiled(self, x: torch.Tensor, row: int, head: int) -> torch.Tensor:
        if x.stride() == (row, head, 1):
            return x
        span = max(row, head * x.shape[1])
        like = x.new_empty(x.shape[0] * span).as_strided(x.shape, (row, head, 1))
        return like.copy_(x)


@dataclass(slots=True)
class LinkedPackedAttention:
    """A PackedAttentionStep, likewise; `attend` serves where `by_rows` does not."""

    attend: Callable[..., None]
    buffer_index: int
    q: int
    k: int
    v: int
    segments: int
    of_scores: dict[str, int]
    out: int
    out_shape: tuple[int, int]
    sm_scale: float
    layer: str
    by_rows: ByRows | None
    by_kernel: bool  # attend is one of the program's kernels, which is faster with long texts
    dead: tuple[int, ...]

    def run(self, values: list[Any], output_buffers: OutputBuffers) -> None:
        q, segments = values[self.q], values[self.segments]
        out = output_buffers(self.buffer_index, q, self.out_shape, q.dtype)
        k, v = values[self.k], values[self.v]
        of_scores = {name: values[register] for name, register in self.of_scores.items()}
        if self.by_rows is not None and segments.rows is not None and (segments.is_captured or not self.by_kernel):
            self.by_rows(q, k, v, segments.rows, of_scores.values(), out)
            values[self.out] = out
            return
        if segments.is_captured:
            raise RuntimeError(f"attention of {self.layer} cannot be captured: the program has no piece for it")
        self.attend(q, k, v, segments.bounds, out, self.sm_scale, self.layer, segments.longest, **of_scores)
        values[self.out] = out


LinkedStep = LinkedPiece | LinkedAttention | LinkedCrossAttention | LinkedState | LinkedPackedAttention
