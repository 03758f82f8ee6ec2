"""The ops that pieces for few tokens call on Hopper where a weight is fp8: schemas, fakes, launches of the runtime's
own binaries.

They are those of ops/stream_linear/ops.py, with a weight that is two tensors. A value is float8_e4m3fn; NaN among them
counts as 480.

Shape legend: T tokens, N outputs and K inputs of a linear, G scales of a row (1 or K / 128), B sums of squares a token.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import Argument, address_of, load_kernel
from mllm_compile.runtime.cuda.tensor_maps import TensorMaps, aligned
from mllm_compile.runtime.ops.stream_fp8.linear import GROUP, Fp8Kind, Fp8Tiling
from mllm_compile.runtime.ops.stream_linear.linear import NORM_ROWS, bucket_of

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")


class _Loaded:
    """One kernel of a linear."""

    def __init__(self, tiling: Fp8Tiling, binaries: Mapping[str, bytes]) -> None:
        self.tiling = tiling
        self._kernel = load_kernel(tiling, binaries)
        self.binary = binaries[tiling.name]
        self._maps = TensorMaps()

    def __call__(
        self,
        x: torch.Tensor,
        values: torch.Tensor,
        scales: torch.Tensor,
        operands: Iterable[torch.Tensor | None],
        eps: float,
        num_tokens: int,
    ) -> None:
        arguments: tuple[Argument, ...] = (
            *self._read(x.view(num_tokens, -1), values),
            *map(address_of, (scales, *operands)),
            ctypes.c_float(eps),
            ctypes.c_int(num_tokens),
        )
        self._kernel.launch(self.tiling.num_blocks, self.tiling.num_threads, arguments)

    def _read(self, x: torch.Tensor, values: torch.Tensor) -> tuple[Argument, Argument]:
        """Tells where the kernel finds values and x. To TMA two values are an element of two bytes."""
        boxes = tensor_maps.halves if self.tiling.kind.gated else tensor_maps.panels
        rows, panels, _ = self.tiling.boxes(len(x))
        return self._maps.get(values.view(torch.bfloat16), boxes, rows, panels), address_of(x)


_LOADED: dict[tuple[int, Fp8Kind, int], _Loaded] = {}  # by device index, linear and bucket


def load_kernels(tilings: Iterable[Fp8Tiling], binaries: Mapping[str, bytes], device: torch.device) -> None:
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


def _loaded(x: torch.Tensor, kind: Fp8Kind, num_tokens: int) -> _Loaded:
    try:
        return _LOADED[x.get_device(), kind, bucket_of(num_tokens)]
    except KeyError:
        raise RuntimeError(f"no kernel is loaded for the linear {kind.name} on {x.device}: call load_kernels") from None


def _num_tokens(x: torch.Tensor) -> int:
    return math.prod(x.shape[:-1])


def _group(scales: torch.Tensor) -> int:
    return 0 if scales.shape[1] == 1 else GROUP


# mllm::stream_fp8_linear ----------------------------------------------------------------------------------------------

_LIBRARY.define(
    "stream_fp8_linear(Tensor x, Tensor values, Tensor scales, Tensor? squares, float eps, bool gated,"
    " Tensor? bias=None) -> Tensor"
)


def plain_kind(
    values: torch.Tensor, scales: torch.Tensor, squares: torch.Tensor | None, gated: bool, has_bias: bool
) -> Fp8Kind:
    """The linear of a call of stream_fp8_linear."""
    rows, columns = map(int, values.shape)
    norm_blocks = 0 if squares is None else int(squares.shape[-1])
    return Fp8Kind(rows, columns, norm_blocks, gated=gated, bias=has_bias, group=_group(scales))


def stream_fp8_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    squares: torch.Tensor | None,
    eps: float,
    gated: bool,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x · (values · scales)ᵀ + bias, of a norm and gated if so asked.

    Args:
        x: […, K] bfloat16, as many as the linear is streamed for (shapes.is_streamed).
        values: [N, K] float8_e4m3fn; of a gated one [gate rows; up rows], [2N, K].
        scales: [N, G] or [2N, G] float32.
        squares: […, B] float32: x is h · norm_weight and these are the sums of squares of h; None: x is taken as it is.
        eps: the norm's.
        gated: silu(gate) * up; without a bias.
        bias: [N] bfloat16; added before the sum is rounded.

    Returns:
        […, N] bfloat16.
    """
    x = aligned(x)
    out = _new_output(x, values, gated)
    num_tokens = _num_tokens(x)
    launch = _loaded(x, plain_kind(values, scales, squares, gated, bias is not None), num_tokens)
    launch(x, values, scales, (squares, None, bias, out, None, None), eps, num_tokens)
    return out


def _new_output(x: torch.Tensor, values: torch.Tensor, gated: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], values.shape[0] // 2 if gated else values.shape[0]))


_LIBRARY.impl("stream_fp8_linear", stream_fp8_linear, "CUDA")
torch.library.register_fake(
    "mllm::stream_fp8_linear",
    lambda x, values, scales, squares, eps, gated, bias=None: _new_output(x, values, gated),
    lib=_LIBRARY,
)

# mllm::stream_fp8_linear_residual -------------------------------------------------------------------------------------

_LIBRARY.define("stream_fp8_linear_residual(Tensor x, Tensor values, Tensor scales, Tensor residual) -> Tensor")


def stream_fp8_linear_residual(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """residual + x · (values · scales)ᵀ: x […, K], residual […, N], both bfloat16 → […, N]."""
    x, residual = aligned(x), aligned(residual)
    out = residual.new_empty(residual.shape)
    num_tokens = _num_tokens(x)
    launch = _loaded(x, residual_kind(values, scales, norm_next=False), num_tokens)
    launch(x, values, scales, (None, residual, None, out, None, None), 0.0, num_tokens)
    return out


def residual_kind(values: torch.Tensor, scales: torch.Tensor, norm_next: bool) -> Fp8Kind:
    """The linear of a call of stream_fp8_linear_residual or stream_fp8_linear_residual_norm."""
    rows, columns = map(int, values.shape)
    next_blocks = rows // NORM_ROWS if norm_next else 0
    return Fp8Kind(rows, columns, residual=True, next_blocks=next_blocks, group=_group(scales))


_LIBRARY.impl("stream_fp8_linear_residual", stream_fp8_linear_residual, "CUDA")
torch.library.register_fake(
    "mllm::stream_fp8_linear_residual",
    lambda x, values, scales, residual: residual.new_empty(residual.shape),
    lib=_LIBRARY,
)

# mllm::stream_fp8_linear_residual_norm --------------------------------------------------------------------------------

_LIBRARY.define(
    "stream_fp8_linear_residual_norm(Tensor x, Tensor values, Tensor scales, Tensor residual, Tensor norm_weight)"
    " -> (Tensor, Tensor, Tensor)"
)


def stream_fp8_linear_residual_norm(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h = residual + x · (values · scales)ᵀ, h · norm_weight, and sums of squares of h.

    Args:
        x: […, K]; values: [N, K]; scales: [N, G]; residual: […, N]; norm_weight: [N].

    Returns:
        The two […, N] bfloat16, the sums […, N / 16] float32: a streamed linear goes on from the latter two.
    """
    x, residual = aligned(x), aligned(residual)
    out, scaled, squares = _norm_outputs(residual, values)
    num_tokens = _num_tokens(x)
    launch = _loaded(x, residual_kind(values, scales, norm_next=True), num_tokens)
    launch(x, values, scales, (None, residual, norm_weight, out, scaled, squares), 0.0, num_tokens)
    return out, scaled, squares


def _norm_outputs(residual: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    squares = residual.new_empty((*residual.shape[:-1], values.shape[0] // NORM_ROWS), dtype=torch.float32)
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape), squares


_LIBRARY.impl("stream_fp8_linear_residual_norm", stream_fp8_linear_residual_norm, "CUDA")
torch.library.register_fake(
    "mllm::stream_fp8_linear_residual_norm",
    lambda x, values, scales, residual, norm_weight: _norm_outputs(residual, values),
    lib=_LIBRARY,
)
