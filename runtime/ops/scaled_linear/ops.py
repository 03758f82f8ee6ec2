"""The op of a linear whose inputs and weight are both float8: one scale a token and a row, or one for 128 inputs of it.

On a Hopper GPU the runtime's own kernel computes linears with a scale a row and 8 to 256 tokens, where the library
takes up to twice as long (docs/lab/kernels.md). The library computes the others, on fp8 tensor cores too. Elsewhere
they are computed in float32. Pieces call it by name, and quantise the inputs themselves
(passes/quantise_activations.py). Defined as `quantised_linear` is, for the same reason.

Shape legend: T tokens, N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import torch
from torch.nn import functional

from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import Argument, address_of
from mllm_compile.runtime.cuda.loaded import LoadedKernel
from mllm_compile.runtime.cuda.tensor_maps import aligned
from mllm_compile.runtime.ops.scaled_linear.kernel import FEWEST_TOKENS, MAX_TOKENS, ScaledTiling, bucket_of, is_taken

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("scaled_linear(Tensor x, Tensor x_scales, Tensor values, Tensor scales) -> Tensor")


_TOKENS_UNIT = 4  # of scales of groups, whose tokens are side by side: copies are of 16 bytes


class _Loaded(LoadedKernel[ScaledTiling]):
    """One kernel."""

    def __call__(
        self, x: torch.Tensor, x_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
    ) -> None:
        boxes = self.kernel.boxes(len(x))
        arguments: tuple[Argument, ...] = (
            self._maps.get(values, tensor_maps.panels, boxes.rows, boxes.panels),
            self._maps.get(x, tensor_maps.rows, boxes.tokens),
            *map(address_of, (x_scales, None, scales, out, None, None)),
            ctypes.c_float(0.0),
            ctypes.c_int(len(x)),
        )
        self._loaded.launch(self.kernel.num_blocks, self.kernel.num_threads, arguments)


_LOADED: dict[tuple[int, int, int, int], _Loaded] = {}  # by device index, N, K and bucket


def load_scaled_kernels(kernels: Iterable[ScaledTiling], binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes these kernels those that the op launches on `device`.

    Args:
        binaries: binaries by the kernel's name; checked by the caller: they are executed.

    Raises:
        ArtifactError: one is missing.
        DeviceError: one cannot be loaded.
    """
    for kernel in kernels:
        with torch.cuda.device(device):
            key = (torch.cuda.current_device(), kernel.kind.rows, kernel.kind.columns, kernel.tokens)
            _Loaded.load_once(_LOADED, key, kernel, binaries)


def scaled_linear(x: torch.Tensor, x_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(x · x_scales) times the transposed (values · scales), on a GPU.

    Args:
        x: [T, K] float8_e4m3fn; K and N are multiples of 16, and K of 128 G.
        x_scales: [T, G] float32; G is 1, or K / 128.
        values: [N, K] float8_e4m3fn.
        scales: [N, G] float32.

    Returns:
        [T, N] bfloat16.
    """
    if scales.shape[1] > 1:
        return _by_groups(x, x_scales, values, scales)
    if FEWEST_TOKENS <= len(x) <= MAX_TOKENS and is_taken(*values.shape):
        return _by_kernel(x, x_scales, values, scales)
    # With fast sums, as in other servers: a sum's own precision is far beyond its operands'.
    return torch._scaled_mm(
        x, values.t(), scale_a=x_scales, scale_b=scales.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _by_kernel(x: torch.Tensor, x_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    tokens, (rows, columns) = len(x), values.shape
    loaded = _LOADED.get((x.get_device(), rows, columns, bucket_of(tokens)))
    if loaded is None:
        raise RuntimeError(f"no kernel is loaded for {rows} x {columns} in fp8 on {x.device}: call load_scaled_kernels")
    out = torch.empty((tokens, rows), dtype=torch.bfloat16, device=x.device)
    loaded(aligned(x), x_scales.contiguous(), values, scales, out)
    return out


def _by_groups(x: torch.Tensor, x_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    tokens = x.shape[0]
    if more := -tokens % _TOKENS_UNIT:
        x = functional.pad(x.view(torch.uint8), (0, 0, 0, more)).view(x.dtype)
        x_scales = functional.pad(x_scales, (0, 0, 0, more))
    of_x, of_weight = (one.t().contiguous().t() for one in (x_scales, scales))  # the library wants rows side by side
    return torch._scaled_mm(x, values.t(), scale_a=of_x, scale_b=of_weight.t(), out_dtype=torch.bfloat16)[:tokens]


def scaled_linear_reference(
    x: torch.Tensor, x_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Computes what `scaled_linear` does, by float32."""
    return (_scaled(x, x_scales) @ _scaled(values, scales).t()).to(torch.bfloat16)


def _scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    groups = values.float().unflatten(-1, (scales.shape[1], -1))
    scaled: torch.Tensor = (groups * scales.unsqueeze(-1)).flatten(-2)
    return scaled


_LIBRARY.impl("scaled_linear", scaled_linear, "CUDA")
_LIBRARY.impl("scaled_linear", scaled_linear_reference, "CPU")
torch.library.register_fake(
    "mllm::scaled_linear",
    lambda x, x_scales, values, scales: x.new_empty((x.shape[0], values.shape[0]), dtype=torch.bfloat16),
    lib=_LIBRARY,
)
