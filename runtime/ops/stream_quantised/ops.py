"""The ops that pieces for few tokens call on Hopper where a weight is in few bits: `stream_quantised_linear`,
`stream_quantised_linear_residual` and `stream_quantised_linear_residual_norm`, as stream_linear/streamed_ops.py has
them. The weight is values, scales [N, G] and, where there are some, zero points [N, G], as runtime/quantised/scheme.py
has them. NaN among fp8 values counts as 480."""

from __future__ import annotations

from mllm_compile.runtime.ops.stream_linear.linear import NORM_ROWS
from mllm_compile.runtime.ops.stream_linear.streamed_ops import StreamedOps
from mllm_compile.runtime.ops.stream_quantised.linear import kind_of_weight
from mllm_compile.runtime.ops.stream_quantised.shapes import MAX_TOKENS

STREAMED = StreamedOps(
    "stream_quantised_linear",
    "Tensor values, Tensor scales, Tensor? zeros",
    kind_of_weight,
    lambda rows, columns: rows // NORM_ROWS,
    launch_tokens=MAX_TOKENS,
)
