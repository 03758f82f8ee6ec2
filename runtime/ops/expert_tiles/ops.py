"""The ops that pieces for many tokens of a mixture of experts call on Hopper: schemas, fakes, and launches of the
runtime's own binaries.

Registered as in runtime/ops/attention/layer_op.py.

Shape legend: T tokens, k experts a token, E experts, P places of `order` (blocks of BLOCK), N rows and K columns of an
expert's weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import address_of
from mllm_compile.runtime.cuda.loaded import LoadedKernel
from mllm_compile.runtime.cuda.tensor_maps import aligned
from mllm_compile.runtime.cuda.units import UNIT_ROWS
from mllm_compile.runtime.ops.expert_tiles.kernel import ExpertTilesKernel

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")


class _Loaded(LoadedKernel[ExpertTilesKernel]):
    """One kernel."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        blocks: torch.Tensor,
        claims: torch.Tensor,
        gather: _Gather,
    ) -> None:
        """
        Args:
            x: rows where `blocks` has them, or where `gather` brings them.
            claims: [1] int32, 0.
        """
        boxes = tensor_maps.expert_halves if self.kernel.is_gated else tensor_maps.expert_rows
        arguments = (
            self._maps.get(weight, boxes),
            self._maps.get(x, tensor_maps.rows, UNIT_ROWS),
            address_of(out),
            _Work(blocks.data_ptr(), len(blocks), claims.data_ptr()),
            gather,
        )
        self._loaded.launch(self.kernel.num_blocks, self.kernel.num_threads, arguments)


class _Work(ctypes.Structure):
    """tiles.cu's Work."""

    _fields_ = (("blocks", ctypes.c_void_p), ("count", ctypes.c_int), ("claims", ctypes.c_void_p))


class _Gather(ctypes.Structure):
    """tiles.cu's Gather; of a linear that is not gated the order alone."""

    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("ready", ctypes.c_void_p),
        ("chosen", ctypes.c_int),
    )


_LOADED: dict[tuple[int, int, int, bool], _Loaded] = {}  # by device index, N, K and is_gated


def load_expert_tiles(
    kernels: Iterable[ExpertTilesKernel], binaries: Mapping[str, bytes], device: torch.device
) -> None:
    """Makes these kernels those that the ops launch on `device`.

    Args:
        binaries: binaries by the kernel's name; checked by the caller: they are executed.

    Raises:
        ArtifactError: one is missing.
        DeviceError: one cannot be loaded.
    """
    for kernel in kernels:
        with torch.cuda.device(device):
            key = (torch.cuda.current_device(), kernel.rows, kernel.columns, kernel.is_gated)
            _Loaded.load_once(_LOADED, key, kernel, binaries)


def _kernel_of(weight: torch.Tensor, is_gated: bool) -> _Loaded:
    _, rows, columns = weight.shape
    loaded = _LOADED.get((weight.get_device(), rows, columns, is_gated))
    if loaded is None:
        raise RuntimeError(f"no kernel is loaded for {rows} x {columns} on {weight.device}: call load_expert_tiles")
    return loaded


_LIBRARY.define("gated_expert_tiles(Tensor x, Tensor order, Tensor blocks, Tensor weight, int num_chosen) -> Tensor")
_LIBRARY.define("expert_tiles(Tensor x, Tensor order, Tensor blocks, Tensor weight, Tensor ids) -> Tensor")


def gated_expert_tiles(
    x: torch.Tensor, order: torch.Tensor, blocks: torch.Tensor, weight: torch.Tensor, num_chosen: int
) -> torch.Tensor:
    """silu(x · gateᵀ) * (x · upᵀ) of each row's token and expert, rounded where the three operations round.

    Args:
        x: [T, K] bfloat16.
        order, blocks: what order_experts gave for blocks of BLOCK rows.
        weight: [E, N, K] bfloat16: gate rows, then up rows.
        num_chosen: k.

    Returns:
        [P, N / 2] bfloat16, each row at its place of `order`; places of no expert's row hold anything.
    """
    x, out = aligned(x), _new_gated(x, order, blocks, weight, num_chosen)
    rows = x.new_empty((order.shape[0], x.shape[1]))
    counts = blocks.new_zeros(len(blocks) + 2)  # the last is of sets
    gather = _Gather(x.data_ptr(), order.data_ptr(), rows.data_ptr(), counts.data_ptr(), num_chosen)
    _kernel_of(weight, True)(rows, weight, out, blocks, counts[-1:], gather)
    return out


def expert_tiles(
    x: torch.Tensor, order: torch.Tensor, blocks: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """x · weightᵀ of each row's expert, at the row's own place.

    Args:
        x: [P, K] bfloat16, rows in the places of `order`.
        order, blocks: as for gated_expert_tiles.
        weight: [E, N, K] bfloat16.
        ids: [T, k], the input of order_experts.

    Returns:
        [T·k, N] bfloat16. Rows of padding are 0, those whose id is no expert's NaN.
    """
    x, out = aligned(x), _new_output(x, order, blocks, weight, ids)
    _kernel_of(weight, False)(x, weight, out, blocks, blocks.new_zeros(1), _Gather(order=order.data_ptr()))
    return out


def _new_gated(
    x: torch.Tensor, order: torch.Tensor, blocks: torch.Tensor, weight: torch.Tensor, num_chosen: int
) -> torch.Tensor:
    return x.new_empty((order.shape[0], weight.shape[1] // 2))


def _new_output(
    x: torch.Tensor, order: torch.Tensor, blocks: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    return x.new_empty((ids.shape[0] * ids.shape[1], weight.shape[1]))


_LIBRARY.impl("gated_expert_tiles", gated_expert_tiles, "CUDA")
_LIBRARY.impl("expert_tiles", expert_tiles, "CUDA")
torch.library.register_fake("mllm::gated_expert_tiles", _new_gated, lib=_LIBRARY)
torch.library.register_fake("mllm::expert_tiles", _new_output, lib=_LIBRARY)
