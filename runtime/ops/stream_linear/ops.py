"""The ops that pieces for few tokens call on Hopper: `stream_linear`, `stream_linear_residual` and
`stream_linear_residual_norm`, as streamed_ops.py has them; the weight is [N, K] bfloat16. lanes.cu, rows.cu, tiles.cu
and wide.cu do the computing."""

from __future__ import annotations

from functools import cache

import torch

from mllm_compile.runtime.ops.stream_linear.linear import LinearKind
from mllm_compile.runtime.ops.stream_linear.shapes import num_streamed_norm_blocks
from mllm_compile.runtime.ops.stream_linear.streamed_ops import StreamedOps


def _kind_of(weight: torch.Tensor) -> LinearKind:
    rows, columns = weight.shape
    return _linear_of(int(rows), int(columns))


@cache
def _linear_of(rows: int, columns: int) -> LinearKind:
    return LinearKind(rows, columns)


STREAMED = StreamedOps("stream_linear", "Tensor weight", _kind_of, num_streamed_norm_blocks)
