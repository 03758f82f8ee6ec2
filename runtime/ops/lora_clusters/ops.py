"""The ops of adapters whose kernels have whole rows in a cluster: schemas, fakes, launches of the runtime's binaries.

Registered as in runtime/ops/attention/layer_op.py.

Shape legend: T tokens; N columns; L slots of adapters, r their rank; R rows of A, of all parts of a linear.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.cuda.loaded import LoadedKernel
from mllm_compile.runtime.cuda.tensor_maps import aligned
from mllm_compile.runtime.ops.lora_clusters.kernel import ClusterKernel, NormKernel, ShrinkKernel

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")


class NormOperands(ctypes.Structure):
    """norm.cu's Operands."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "residual", "shrunk", "b", "weight", "next_a", "slots")),
        *((name, ctypes.c_void_p) for name in ("out", "normed", "products")),
        ("num_tokens", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


class ShrinkOperands(ctypes.Structure):
    """shrink.cu's Operands."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "a", "slots", "out")),
        ("num_tokens", ctypes.c_int),
        ("early_slots", ctypes.c_int),
    )


class _Loaded(LoadedKernel[ClusterKernel]):
    """One kernel."""

    def __call__(self, num_tokens: int, operands: ctypes.Structure) -> None:
        self._loaded.launch(self.kernel.num_blocks(num_tokens), self.kernel.num_threads, (operands,))


_LOADED: dict[tuple[int, ClusterKernel], _Loaded] = {}  # by device index


def load_cluster_kernels(kernels: Iterable[ClusterKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes these kernels those that the ops launch on `device`.

    Args:
        binaries: binaries by the kernel's name; checked by the caller: they are executed.

    Raises:
        ArtifactError: one is missing.
        DeviceError: one cannot be loaded.
    """
    with torch.cuda.device(device):
        for kernel in kernels:
            _Loaded.load_once(_LOADED, (torch.cuda.current_device(), kernel), kernel, binaries)


_LIBRARY.define("lora_shrink_in_clusters(Tensor x, Tensor a, Tensor slots, bool early_slots) -> Tensor")
_LIBRARY.define(
    "lora_norm_in_clusters(Tensor y, Tensor shrunk, Tensor b, Tensor slots, Tensor residual, Tensor norm_weight, "
    "float eps, bool plus_one, Tensor next_a) -> (Tensor, Tensor, Tensor)"
)


def lora_shrink_in_clusters(x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor, early_slots: bool) -> torch.Tensor:
    """Products of x […, N] bfloat16 of T tokens with A [L, R, N] of each token's slot [T] int32; -1: none.

    A token's numbers are the same in any company.

    Args:
        early_slots: as lora_shrink has it.

    Returns:
        [1, T, R] bfloat16, zeros of tokens without a slot.
    """
    x, out = aligned(x), _products(x, a)
    operands = ShrinkOperands(*(one.data_ptr() for one in (x, a, slots, out)), out.shape[1], early_slots)
    _loaded(ShrinkKernel(a.shape[2], a.shape[1]), x)(out.shape[1], operands)
    return out


def lora_norm_in_clusters(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    plus_one: bool,
    next_a: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A residual plus y plus what adapters add to y, the RMS norm of that, and its products with the next A.

    A token's numbers are the same in any company.

    Args:
        y, residual: […, N] bfloat16 of T tokens; shrunk: [1, T, r] bfloat16, A · x of each token's slot.
        b: [L, N, r] bfloat16; slots: [T] int32, an input of the step; -1: the token has no adapter.
        norm_weight: [N] bfloat16; with `plus_one` 1 is added to it.
        next_a: [L, R, N] bfloat16.

    Returns:
        h = residual + (y + B u), and its norm, […, N]; [1, T, R], zeros of tokens without a slot; all bfloat16.
        Rounded where the operations round; the norm once, behind its weight.
    """
    operands = (aligned(y), aligned(residual), aligned(shrunk), b, norm_weight, next_a, slots)
    outputs = y.new_empty(y.shape), y.new_empty(y.shape), _products(y, next_a)
    addresses = (one.data_ptr() for one in (*operands, *outputs))
    kernel = NormKernel(y.shape[-1], next_a.shape[1], b.shape[2], plus_one)
    _loaded(kernel, y)(slots.shape[0], NormOperands(*addresses, slots.shape[0], eps))
    return outputs


def _loaded(kernel: ClusterKernel, on: torch.Tensor) -> _Loaded:
    loaded = _LOADED.get((on.get_device(), kernel))
    if loaded is None:
        raise RuntimeError(f"no kernel {kernel.name} is loaded on {on.device}: call load_cluster_kernels")
    return loaded


def _products(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return x.new_empty((1, math.prod(x.shape[:-1]), a.shape[1]))


def _new_products(x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor, early_slots: bool) -> torch.Tensor:
    return _products(x, a)


def _new_outputs(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    plus_one: bool,
    next_a: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return y.new_empty(y.shape), y.new_empty(y.shape), _products(y, next_a)


_LIBRARY.impl("lora_shrink_in_clusters", lora_shrink_in_clusters, "CUDA")
_LIBRARY.impl("lora_norm_in_clusters", lora_norm_in_clusters, "CUDA")
torch.library.register_fake("mllm::lora_shrink_in_clusters", _new_products, lib=_LIBRARY)
torch.library.register_fake("mllm::lora_norm_in_clusters", _new_outputs, lib=_LIBRARY)
