"""The ops that pieces for few tokens call on Hopper: `stream_linear`, `stream_linear_residual` and
`stream_linear_residual_norm`, as streamed_ops.py has them; the weight is [N, K] bfloat16. lanes.cu, rows.cu, tiles.cu
and wide.cu do the computing. And `stream_linear_layer_norm`, whose inputs are normed by the linear itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from mllm_compile.runtime.cuda.tensor_maps import aligned
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind
from mllm_compile.runtime.ops.stream_linear.shapes import num_streamed_norm_blocks
from mllm_compile.runtime.ops.stream_linear.streamed_ops import StreamedOps


class PlainOps(StreamedOps):
    """The ops of weights in bfloat16.

    `<prefix>_layer_norm(x, weight, norm_weight, norm_bias, eps, bias=None, gelu=False)` is
    layer_norm(x) · weightᵀ + bias, or gelu by erf of these sums, rounded: x […, K] of up to LAYER_NORM_TOKENS tokens,
    norm_weight and norm_bias [K], bias [N], all bfloat16 → […, N]. The norm is computed in float32, and rounded once.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix, "Tensor weight", _kind_of, num_streamed_norm_blocks)
        self._define(
            f"{prefix}_layer_norm(Tensor x, Tensor weight, Tensor norm_weight, Tensor norm_bias, float eps,"
            " Tensor? bias=None, bool gelu=False) -> Tensor",
            self._layer_norm,
            _fake_layer_norm,
        )

    def kind_of_call(self, node: Any, name: str) -> LinearKind:
        if name != "_layer_norm":
            return super().kind_of_call(node, name)
        _, weight, _, _, _, *last = node.args
        return _layer_norm_kind(weight.meta["val"], *last)

    def _layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None = None,
        gelu: bool = False,
    ) -> torch.Tensor:
        out, kind = _fake_layer_norm(x, weight), _layer_norm_kind(weight, bias, gelu)
        norm_weight, norm_bias = aligned(norm_weight), aligned(norm_bias)
        self._launch(aligned(x), (weight,), kind, (norm_weight, norm_bias, bias, out, None, None), eps)
        return out


def _kind_of(weight: torch.Tensor) -> LinearKind:
    rows, columns = weight.shape
    return _linear_of(int(rows), int(columns))


@cache
def _linear_of(rows: int, columns: int) -> LinearKind:
    return LinearKind(rows, columns)


def _layer_norm_kind(weight: torch.Tensor, bias: object = None, gelu: bool = False) -> LinearKind:
    return replace(_kind_of(weight), layer_norm=True, bias=bias is not None, gelu=gelu)


def _fake_layer_norm(x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


STREAMED = PlainOps("stream_linear")
