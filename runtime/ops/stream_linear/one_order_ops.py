"""The ops of linears whose rows have the same bits in any company: `linear_in_one_order` and its gated sibling.

Few rows are multiplied by kernels of undivided.py. More are the library's, which LEAST_ROWS or more give one
order (runtime/device/open.py), or of gated.cu. Registered as in runtime/ops/attention/layer_op.py.

Shape legend: N outputs and K inputs of a linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.cuda.tensor_maps import aligned
from mllm_compile.runtime.ops.gated_linear.ops import gated_linear
from mllm_compile.runtime.ops.stream_linear.linear import MAX_STREAMED_TOKENS, LinearKind, bucket_of
from mllm_compile.runtime.ops.stream_linear.streamed_ops import LoadedLinear
from mllm_compile.runtime.ops.stream_linear.undivided import UndividedTiling, bytes_ahead

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
# By device index, linear, bucket and bytes of the next linear's weight.
_LOADED: dict[tuple[int, LinearKind, int, int], LoadedLinear] = {}


def load_undivided(tilings: Iterable[UndividedTiling], binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes these kernels those that the ops launch on `device`.

    Args:
        binaries: binaries by the tiling's name; checked by the caller: they are executed.

    Raises:
        ArtifactError: one is missing.
        DeviceError: one cannot be loaded.
    """
    for tiling in tilings:
        with torch.cuda.device(device):
            key = (torch.cuda.current_device(), tiling.kind, tiling.tokens, tiling.ahead_bytes)
            LoadedLinear.load_once(_LOADED, key, tiling, binaries)


def linear_in_one_order(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ahead: torch.Tensor | None = None
) -> torch.Tensor:
    """x · weightᵀ + bias, the bias added before the sum is rounded.

    Bits are the library's own with fewer than LEAST_ROWS rows that have no such kernel; no step has them.

    Args:
        x: […, K] bfloat16.
        weight: [N, K] bfloat16, which no kernel of the step writes.
        bias: [N] bfloat16.
        ahead: the weight of the linear behind, contiguous bfloat16: few rows ask a part of it into the L2 meanwhile.

    Returns:
        […, N] bfloat16.
    """
    loaded = _kernel(x, weight, has_bias=bias is not None, ahead=ahead)
    return torch.nn.functional.linear(x, weight, bias) if loaded is None else _launched(loaded, x, weight, bias, ahead)


def gated_linear_in_one_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x · gateᵀ) * (x · upᵀ) of any number of rows, as mllm.gated_linear has it (gated_linear/ops.py)."""
    loaded = _kernel(x, weight, is_gated=True)
    return gated_linear(x, weight) if loaded is None else _launched(loaded, x, weight, None)


def _kernel(
    x: torch.Tensor,
    weight: torch.Tensor,
    has_bias: bool = False,
    is_gated: bool = False,
    ahead: torch.Tensor | None = None,
) -> LoadedLinear | None:
    """The kernel for few rows; None for none or more, or where none is loaded."""
    num_rows = math.prod(x.shape[:-1])
    if not 0 < num_rows <= MAX_STREAMED_TOKENS:
        return None
    rows, columns = weight.shape
    kind = LinearKind(int(rows), int(columns), gated=is_gated, bias=has_bias)
    num_bytes = 0 if ahead is None else bytes_ahead(*map(int, ahead.shape))
    return _LOADED.get((x.get_device(), kind, bucket_of(num_rows), num_bytes))


def _launched(
    loaded: LoadedLinear,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ahead: torch.Tensor | None = None,
) -> torch.Tensor:
    out = _new_output(x, weight, loaded.kernel.kind.gated)
    weights = (weight,) if ahead is None else (weight, ahead)
    loaded(aligned(x), weights, (None, None, bias, out, None, None), 0.0, math.prod(x.shape[:-1]))
    return out


def _new_output(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]))


_LIBRARY.define("linear_in_one_order(Tensor x, Tensor weight, Tensor? bias, Tensor? ahead=None) -> Tensor")
_LIBRARY.define("gated_linear_in_one_order(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.impl("linear_in_one_order", linear_in_one_order, "CUDA")
_LIBRARY.impl("gated_linear_in_one_order", gated_linear_in_one_order, "CUDA")
torch.library.register_fake(
    "mllm::linear_in_one_order", lambda x, weight, bias, ahead=None: _new_output(x, weight, False), lib=_LIBRARY
)
torch.library.register_fake(
    "mllm::gated_linear_in_one_order", lambda x, weight: _new_output(x, weight, True), lib=_LIBRARY
)
