"""The ops of streamed linears in plain torch, where their kernels cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import linear, silu

from mllm_compile.runtime.stream_linear import ops  # noqa: F401  (defines the ops)
from mllm_compile.runtime.stream_linear.shapes import NORM_ROWS


def _linear(x, weight, squares, eps, gated):
    product = linear(x.float(), weight.float())
    if squares is not None:
        product = product * torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + eps)
    product = product.to(x.dtype)
    if not gated:
        return product
    gate, up = product.chunk(2, -1)
    return silu(gate) * up


def _linear_residual_norm(x, weight, residual, norm_weight):
    out = residual + linear(x, weight)
    return out, out * norm_weight, out.float().pow(2).unflatten(-1, (-1, NORM_ROWS)).sum(-1)


@contextmanager
def streamed_ops_on_cpu() -> Iterator[None]:
    library = torch.library.Library("mllm", "IMPL")
    library.impl("stream_linear", _linear, "CPU")
    library.impl("stream_linear_residual", lambda x, weight, residual: residual + linear(x, weight), "CPU")
    library.impl("stream_linear_residual_norm", _linear_residual_norm, "CPU")
    yield
    del library
