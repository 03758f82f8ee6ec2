"""The ops that pieces for many tokens call on Hopper: schemas, fakes, and launches of the runtime's own binaries.

Registered as in runtime/ops/attention/layer_op.py.

Shape legend: T tokens; N rows (gates, then ups) and K columns of the weight; L slots of adapters, r their rank.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import Argument, address_of
from mllm_compile.runtime.cuda.loaded import LoadedKernel
from mllm_compile.runtime.cuda.tensor_maps import aligned
from mllm_compile.runtime.ops.gated_linear.kernel import GatedKernel, choose, divided

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")


class _Adapters(ctypes.Structure):
    """gated.cu's Adapters."""

    _fields_ = (("shrunk", ctypes.c_void_p), ("slots", ctypes.c_void_p))


class _Loaded(LoadedKernel[GatedKernel]):
    """One kernel."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *adapters: torch.Tensor) -> None:
        """x [T, K], weight [N, K] → out [T, N / 2]; adapters as gated_linear_lora has them."""
        num_tokens = len(x)
        division, box = divided(num_tokens), self.kernel.box_tokens(num_tokens)
        arguments = (
            self._maps.get(weight, tensor_maps.spread_halves),
            self._maps.get(x, tensor_maps.rows, box),
            *self._of_adapters(*adapters),
            address_of(out),
            (ctypes.c_int * 5)(num_tokens, division.tiles, division.units, division.larger, box),
        )
        self._loaded.launch(self.kernel.num_blocks(num_tokens), self.kernel.num_threads, arguments)

    def _of_adapters(self, *adapters: torch.Tensor) -> tuple[Argument, ...]:
        if not adapters:
            return ()
        shrunk, b, slots = adapters
        halves = (self._maps.get(half, tensor_maps.spread_slots) for half in b.chunk(2, 1))
        return (*halves, _Adapters(shrunk.data_ptr(), slots.data_ptr()))


class _Weight:
    """The kernels of one shape of weights and rank of adapters, which differ in their tiles."""

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


_WEIGHTS: dict[tuple[int, int, int, int], _Weight] = {}  # by device index, shape and rank


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
            key = (torch.cuda.current_device(), kernel.rows, kernel.columns, kernel.rank)
            _WEIGHTS.setdefault(key, _Weight()).load(kernel, binaries)


_LIBRARY.define("gated_linear(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.define("gated_linear_lora(Tensor x, Tensor weight, Tensor shrunk, Tensor b, Tensor slots) -> Tensor")


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x · gateᵀ) * (x · upᵀ), rounded where the three operations round.

    A token's numbers are the same in any company.

    Args:
        x: […, K] bfloat16, of any number of tokens.
        weight: [N, K] bfloat16: gate rows, then up rows.

    Returns:
        […, N / 2] bfloat16.
    """
    return _launched(x, weight, 0)


def gated_linear_lora(
    x: torch.Tensor, weight: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """gated_linear with what adapters add to gates and ups ahead of their rounding.

    Args:
        shrunk: [T, 2 r] bfloat16, contiguous: A · x of each token's slot, of gates and of ups.
        b: [L, N, r] bfloat16, of gates, then of ups.
        slots: [T] int32; -1: the token has no adapter.

    Returns:
        […, N / 2] bfloat16.
    """
    return _launched(x, weight, b.shape[2], aligned(shrunk), b, slots)


def _launched(x: torch.Tensor, weight: torch.Tensor, rank: int, *adapters: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    of_weight = _WEIGHTS.get((x.get_device(), rows, columns, rank))
    if of_weight is None or not of_weight.loaded:
        of_rank = f" with adapters of rank {rank}" if rank else ""
        raise RuntimeError(
            f"no kernel is loaded for {rows} x {columns}{of_rank} on {x.device}: call load_gated_kernels"
        )
    num_tokens = math.prod(x.shape[:-1])
    x, out = aligned(x), _new_output(x, weight)
    of_weight.fastest(num_tokens)(x.view(num_tokens, -1), weight, out.view(num_tokens, -1), *adapters)
    return out


def _new_output(x: torch.Tensor, weight: torch.Tensor, *adapters: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


_LIBRARY.impl("gated_linear", gated_linear, "CUDA")
_LIBRARY.impl("gated_linear_lora", gated_linear_lora, "CUDA")
for _name in ("gated_linear", "gated_linear_lora"):
    torch.library.register_fake(f"mllm::{_name}", _new_output, lib=_LIBRARY)
