"""The op that pieces for many tokens call on Hopper: schema, fake, and the launch of the runtime's own binaries.

Registered as in runtime/ops/attention/layer_op.py.

Shape legend: N rows (gates, then ups) and K columns of the weight.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import address_of
from mllm_compile.runtime.cuda.loaded import LoadedKernel
from mllm_compile.runtime.cuda.tensor_maps import aligned
from mllm_compile.runtime.ops.gated_linear.kernel import GatedKernel, choose, divided

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")


class _Loaded(LoadedKernel[GatedKernel]):
    """One kernel."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, K], weight [N, K] → out [T, N / 2]."""
        num_tokens = len(x)
        division, box = divided(num_tokens), self.kernel.box_tokens(num_tokens)
        arguments = (
            self._maps.get(weight, tensor_maps.spread_halves),
            self._maps.get(x, tensor_maps.rows, box),
            address_of(out),
            (ctypes.c_int * 5)(num_tokens, division.tiles, division.units, division.larger, box),
        )
        self._loaded.launch(self.kernel.num_blocks(num_tokens), self.kernel.num_threads, arguments)


class _Weight:
    """The kernels of one shape of weights, which differ in their tiles."""

    def __init__(self) -> None:
        self.loaded: dict[GatedKernel, _Loaded] = {}
        self._fastest: dict[int, _Loaded] = {}  # by tokens; a step has some thousands

    def load(self, kernel: GatedKernel, binaries: Mapping[str, bytes]) -> None:
        if _Loaded.load_once(self.loaded, kernel, kernel, binaries):
            self._fastest.clear()

    def fastest(self, num_tokens: int) -> _Loaded:
        if num_tokens not in self._fastest:
            self._fastest[num_tokens] = self.loaded[choose(self.loaded, num_tokens)]
        return self._fastest[num_tokens]


_WEIGHTS: dict[tuple[int, int, int], _Weight] = {}  # by device index and shape


def load_gated_kernels(kernels: Iterable[GatedKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes these kernels those that the op launches on `device`.

    Args:
        binaries: binaries by the kernel's name; checked by the caller: they are executed.

    Raises:
        ArtifactError: one is missing.
        DeviceError: one cannot be loaded.
    """
    for kernel in kernels:
        with torch.cuda.device(device):
            key = (torch.cuda.current_device(), kernel.rows, kernel.columns)
            _WEIGHTS.setdefault(key, _Weight()).load(kernel, binaries)


_LIBRARY.define("gated_linear(Tensor x, Tensor weight) -> Tensor")


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x · gateᵀ) * (x · upᵀ), rounded where the three operations round.

    A token's numbers are the same in any company.

    Args:
        x: […, K] bfloat16, of any number of tokens.
        weight: [N, K] bfloat16: gate rows, then up rows.

    Returns:
        […, N / 2] bfloat16.
    """
    rows, columns = weight.shape
    of_weight = _WEIGHTS.get((x.get_device(), rows, columns))
    if of_weight is None or not of_weight.loaded:
        raise RuntimeError(f"no kernel is loaded for {rows} x {columns} on {x.device}: call load_gated_kernels")
    num_tokens = math.prod(x.shape[:-1])
    x, out = aligned(x), _new_output(x, weight)
    of_weight.fastest(num_tokens)(x.view(num_tokens, -1), weight, out.view(num_tokens, -1))
    return out


def _new_output(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


_LIBRARY.impl("gated_linear", gated_linear, "CUDA")
torch.library.register_fake("mllm::gated_linear", _new_output, lib=_LIBRARY)
