"""The ops that pieces for few tokens call on Hopper: schemas, fakes, and launches of the runtime's own binaries.

Registered as in runtime/ops/attention.py. lanes.cu, rows.cu, tiles.cu and wide.cu do the computing;
a norm between two linears works as in runtime/ops/few_tokens.py: the first linear leaves h · norm_weight and sums of
squares of h, the second one multiplies by the norm's factor.

Shape legend: T tokens, N outputs and K inputs of a linear, B sums of squares a token (shapes.py says how many).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import Argument, address_of, load_kernel
from mllm_compile.runtime.cuda.tensor_maps import TensorMaps, aligned
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind, LinearTiling, bucket_of
from mllm_compile.runtime.ops.stream_linear.shapes import num_streamed_norm_blocks

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")


class _Loaded:
    """One kernel of a linear."""

    def __init__(self, tiling: LinearTiling, binaries: Mapping[str, bytes]) -> None:
        self.tiling = tiling
        self._kernel = load_kernel(tiling, binaries)
        self.binary = binaries[tiling.name]
        self._maps = TensorMaps()

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        operands: Iterable[torch.Tensor | None],
        eps: float,
        num_tokens: int,
    ) -> None:
        arguments = (
            *self._read(x.view(num_tokens, -1), weight),
            *map(address_of, operands),
            ctypes.c_float(eps),
            ctypes.c_int(num_tokens),
        )
        self._kernel.launch(self.tiling.num_blocks, self.tiling.num_threads, arguments)

    def _read(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[Argument, Argument]:
        """Tells where the kernel finds weight and x."""
        tiling = self.tiling
        boxes = tiling.boxes(len(x))
        if boxes is None:
            return address_of(weight), address_of(x)
        of_weight = tensor_maps.halves if tiling.kind.gated else tensor_maps.panels
        weight_map = self._maps.get(weight, of_weight, boxes.rows, boxes.panels)
        return weight_map, self._maps.get(x, tensor_maps.rows, boxes.tokens)


_LOADED: dict[tuple[int, LinearKind, int], _Loaded] = {}  # by device index, linear and bucket


def load_kernels(tilings: Iterable[LinearTiling], binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes these kernels those that the ops launch on `device`.

    Args:
        binaries: binaries by the tiling's name; checked by the caller: they are executed.

    Raises:
        ArtifactError: one is missing.
        DeviceError: one cannot be loaded.
    """
    for tiling in tilings:
        with torch.cuda.device(device):
            key, binary = (torch.cuda.current_device(), tiling.kind, tiling.tokens), binaries.get(tiling.name)
            loaded = _LOADED.get(key)
            if loaded is None or (loaded.tiling, loaded.binary) != (tiling, binary):  # once for a process's engines
                _LOADED[key] = _Loaded(tiling, binaries)


def _loaded(x: torch.Tensor, kind: LinearKind, num_tokens: int) -> _Loaded:
    try:
        return _LOADED[x.get_device(), kind, bucket_of(num_tokens)]
    except KeyError:
        raise RuntimeError(f"no kernel is loaded for the linear {kind.name} on {x.device}: call load_kernels") from None


def _num_tokens(x: torch.Tensor) -> int:
    return math.prod(x.shape[:-1])


# mllm::stream_linear --------------------------------------------------------------------------------------------------

_LIBRARY.define(
    "stream_linear(Tensor x, Tensor weight, Tensor? squares, float eps, bool gated, Tensor? bias=None) -> Tensor"
)


def plain_kind(weight: torch.Tensor, squares: torch.Tensor | None, gated: bool, has_bias: bool) -> LinearKind:
    """The linear of a call of stream_linear."""
    rows, columns = weight.shape
    norm_blocks = 0 if squares is None else int(squares.shape[-1])
    return LinearKind(int(rows), int(columns), norm_blocks, gated=gated, bias=has_bias)


def stream_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    squares: torch.Tensor | None,
    eps: float,
    gated: bool,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x · weightᵀ + bias, of a norm and gated if so asked.

    Args:
        x: […, K] bfloat16, as many as the linear is streamed for (shapes.is_streamed).
        weight: [N, K]; of a gated one [gate rows; up rows], [2N, K].
        squares: […, B] float32: x is h · norm_weight and these are the sums of squares of h; None: x is taken as it is.
        eps: the norm's.
        gated: silu(gate) * up; without a bias.
        bias: [N]; added before the sum is rounded.

    Returns:
        […, N] bfloat16.
    """
    x = aligned(x)
    out = _new_output(x, weight, gated)
    num_tokens = _num_tokens(x)
    launch = _loaded(x, plain_kind(weight, squares, gated, bias is not None), num_tokens)
    launch(x, weight, (squares, None, bias, out, None, None), eps, num_tokens)
    return out


def _new_output(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]))


_LIBRARY.impl("stream_linear", stream_linear, "CUDA")
torch.library.register_fake(
    "mllm::stream_linear",
    lambda x, weight, squares, eps, gated, bias=None: _new_output(x, weight, gated),
    lib=_LIBRARY,
)

# mllm::stream_linear_residual -----------------------------------------------------------------------------------------

_LIBRARY.define("stream_linear_residual(Tensor x, Tensor weight, Tensor residual) -> Tensor")


def stream_linear_residual(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual + x · weightᵀ: x […, K], weight [N, K], residual […, N], all bfloat16 → […, N]."""
    x, residual = aligned(x), aligned(residual)
    out = residual.new_empty(residual.shape)
    num_tokens = _num_tokens(x)
    launch = _loaded(x, residual_kind(weight, norm_next=False), num_tokens)
    launch(x, weight, (None, residual, None, out, None, None), 0.0, num_tokens)
    return out


def residual_kind(weight: torch.Tensor, norm_next: bool) -> LinearKind:
    """The linear of a call of stream_linear_residual or stream_linear_residual_norm."""
    rows, columns = map(int, weight.shape)
    next_blocks = num_streamed_norm_blocks(rows, columns) if norm_next else 0
    return LinearKind(rows, columns, residual=True, next_blocks=next_blocks)


_LIBRARY.impl("stream_linear_residual", stream_linear_residual, "CUDA")
torch.library.register_fake(
    "mllm::stream_linear_residual", lambda x, weight, residual: residual.new_empty(residual.shape), lib=_LIBRARY
)

# mllm::stream_linear_residual_norm ------------------------------------------------------------------------------------

_LIBRARY.define(
    "stream_linear_residual_norm(Tensor x, Tensor weight, Tensor residual, Tensor norm_weight)"
    " -> (Tensor, Tensor, Tensor)"
)


def stream_linear_residual_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h = residual + x · weightᵀ, h · norm_weight, and sums of squares of h.

    Args:
        x: […, K]; weight: [N, K]; residual: […, N]; norm_weight: [N]; all bfloat16.

    Returns:
        The two […, N] bfloat16, the sums […, B] float32: stream_linear goes on from the latter two.
    """
    x, residual = aligned(x), aligned(residual)
    out, scaled, squares = _norm_outputs(residual, weight)
    num_tokens = _num_tokens(x)
    launch = _loaded(x, residual_kind(weight, norm_next=True), num_tokens)
    launch(x, weight, (None, residual, norm_weight, out, scaled, squares), 0.0, num_tokens)
    return out, scaled, squares


def _norm_outputs(residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_blocks = num_streamed_norm_blocks(*map(int, weight.shape))
    squares = residual.new_empty((*residual.shape[:-1], num_blocks), dtype=torch.float32)
    return (
        torch.empty(residual.shape, dtype=residual.dtype, device=residual.device),
        residual.new_empty(residual.shape),
        squares,
    )


_LIBRARY.impl("stream_linear_residual_norm", stream_linear_residual_norm, "CUDA")
torch.library.register_fake(
    "mllm::stream_linear_residual_norm",
    lambda x, weight, residual, norm_weight: _norm_outputs(residual, weight),
    lib=_LIBRARY,
)
