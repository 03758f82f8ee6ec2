"""The memory of requests: rows of slots, pages of keys and values per layer, and states of layers that carry one.

A *KV slot* is the place of one token's keys and values: page * page_size + offset (`out_cache_loc`, `slot_mapping`). A
*row* is a request's line in ReqToTokenPool's table (`req_pool_indices`, `Request.row`), and in the sampling state. Page
0 and row 0 belong to no request: padding writes and reads there. A request's state is in the same row of GDNPool.
The host assigns pages in schedule/pages/allocator.py, and rows in schedule/rows.py. docs/glossary.md has all words.

Shape legend: P pages, S page size, Hk kv heads, D head dim, N entries.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mllm_compile.runtime.device.arena import Arena, Kind
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.schedule.pages.allocator import TokenToKVPoolAllocator

_ALIGNMENT = 16  # bytes
_COPIED_BYTES = 128 << 20  # of rows that are read before they are written elsewhere, unless one layer's are more

__all__ = ["GDNPool", "KVPool", "ReqToTokenPool", "TokenToKVPoolAllocator"]


class ReqToTokenPool:
    """Maps (request row, position) to the KV slot. Row 0 is the dummy row of padding, its slots all in page 0.

    Attributes:
        req_to_token: [max_reqs + 1, max_context_len] int32 on the device.
    """

    def __init__(self, max_reqs: int, max_context_len: int, device: torch.device | str) -> None:
        self.max_context_len = max_context_len
        self.req_to_token = torch.zeros(max_reqs + 1, max_context_len, dtype=torch.int32, device=device)

    def from_each_page(self, page_size: int) -> ReqToTokenPool:
        """The same table, with a row from each page on: row r * (max_context_len / page_size) + p begins at page p of
        row r, and goes on into the next row. The last row has its first page alone."""
        found = copy.copy(self)
        rows, width = self.req_to_token.shape
        found.req_to_token = self.req_to_token.as_strided(
            ((rows - 1) * (width // page_size) + 1, width), (page_size, 1)
        )
        return found

    def write_pages(
        self, rows: torch.Tensor, page_positions: torch.Tensor, page_ids: torch.Tensor, page_size: int
    ) -> None:
        """Enter whole pages: page_ids[i] becomes the page_positions[i]-th page of rows[i]; all [N] int64."""
        offsets = torch.arange(page_size, dtype=torch.int32, device=page_ids.device)
        slots = page_ids.to(torch.int32)[:, None] * page_size + offsets
        self.write_page_slots(rows * (self.max_context_len // page_size) + page_positions, slots.flatten())

    def write_page_slots(self, places: torch.Tensor, page_slots: torch.Tensor) -> None:
        """Like write_pages, by one launch.

        Args:
            places: [N] int64, counted over the pages of all rows.
            page_slots: [N * page_size] int32.

        Raises:
            ValueError: rows are not made of whole pages.
        """
        slots = page_slots.view(places.shape[0], -1)
        if self.max_context_len % slots.shape[1]:
            raise ValueError(f"rows of {self.max_context_len} slots cannot take pages of {slots.shape[1]}")
        self.req_to_token.view(-1, slots.shape[1]).index_copy_(0, places, slots)


class KVPool:
    """Keys and values of every layer, in pages.

    Args:
        num_pages: pages, the dummy page 0 included.
        layers: per layer (num_kv_heads, head_dim, v_head_dim), as LayerSpec.cache_shape has them: with v_head_dim 0
            the values are part of the keys, and none are written.
        dtype: the cache's; k and v are cast to it when written. fp8 has no scales: larger values saturate.
        arena: takes the memory; None: torch does.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        layers: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device | str,
        arena: Arena | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        # Zeros, not empty: a masked-out key that happens to be NaN would still poison 0 * NaN in a value product.
        kinds = [((num_pages, page_size, hk, d), dtype) for hk, *dims in layers for d in dims]
        tensors = _zeros(kinds, device, arena)
        self._k, self._v = tensors[::2], tensors[1::2]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Each layer's keys, [P, S, Hk, D], and values."""
        return [*self._k, *self._v]

    @staticmethod
    def bytes_per_page(page_size: int, layers: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> int:
        """Bytes that one page takes over all layers."""
        return page_size * sum(hk * (d + dv) for hk, d, dv in layers) * dtype.itemsize

    def get_pages(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k [P, S, Hk, D], v [P, S, Hk, Dv])."""
        return self._k[layer_id], self._v[layer_id]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k [P * S, Hk, D], v [P * S, Hk, Dv]): views of the pages, indexed by slot."""
        return self._k[layer_id].flatten(0, 1), self._v[layer_id].flatten(0, 1)

    def set_kv_buffer(self, layer_id: int, indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k [N, Hk, D], v [N, Hk, Dv] at slots `indices` [N] int64. Safe inside a CUDA graph."""
        for buffer, values in zip(self.get_kv_buffer(layer_id), (k, v), strict=True):
            if not buffer.shape[2]:
                continue
            if self.dtype.itemsize == 1:  # torch copies fp8 to an index only as bytes
                buffer.view(torch.uint8).index_copy_(0, indices, _saturated(values, self.dtype).view(torch.uint8))
            else:
                buffer.index_copy_(0, indices, values.to(self.dtype))

    def clear_pages(self, page_ids: torch.Tensor) -> None:
        """Make all that these pages ([N] int64) hold zero, in every layer."""
        for buffer in (one for one in (*self._k, *self._v) if one.numel()):
            buffer.view(torch.uint8).index_fill_(0, page_ids, 0)


class RoutePool:
    """The experts that each token chose, in every layer of experts, by the slot of the token's KV.

    So prefix hits, chunks and preemptions need no care: who has the slot has the choice.

    Args:
        num_experts: of each layer, in the order of the layers.
        num_slots: tokens that it holds.
        arena: as of KVPool.
    """

    def __init__(
        self,
        num_experts: Mapping[str, int],
        num_slots: int,
        device: torch.device | str,
        arena: Arena | None = None,
    ) -> None:
        self.layers = tuple(num_experts)
        most = max(num_experts.values(), default=0)
        self._dtype = torch.uint8 if most <= 256 else torch.int16
        self._num_slots, self._device, self._arena = num_slots, device, arena
        self._tables: dict[str, torch.Tensor] = {}  # [num_slots, k] each, made when its layer first runs
        self._chosen: dict[str, int] = {}  # k of each layer that has run

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a token in all layers that have run."""
        return sum(self._chosen.values()) * self._dtype.itemsize

    def resize(self, num_slots: int) -> None:
        """Forgets all; takes so many tokens from now on. Not after a capture: graphs write to the tables of before."""
        self._num_slots = num_slots
        self._tables.clear()

    def keep(self, layer: str, ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep ids [T, k] of tokens at slots [T] int64. Safe inside a CUDA graph once the layer has run."""
        table = self._tables.get(layer)
        if table is None:
            self._chosen[layer] = ids.shape[1]
            (table,) = _zeros([((self._num_slots, ids.shape[1]), self._dtype)], self._device, self._arena)
            self._tables[layer] = table
        table.index_copy_(0, slots, ids.to(self._dtype))

    def read(self, slots: np.ndarray) -> np.ndarray:
        """[N, layers, k] int16 of tokens at slots [N] int64; -1 behind those of layers that choose fewer than others.
        Waits for the device."""
        indices, most = upload(slots, torch.device(self._device)), max(self._chosen.values())
        routes = [self._tables[layer].index_select(0, indices).to(torch.int16) for layer in self.layers]
        padded = [torch.nn.functional.pad(one, (0, most - one.shape[1]), value=-1) for one in routes]
        found: np.ndarray = torch.stack(padded, dim=1).cpu().numpy()
        return found


class GDNPool:
    """States of layers that carry one from token to token: gated delta nets, and every other recurrence.

    A row is a request's, the same as in ReqToTokenPool; rows behind those hold states of cached prefixes
    (schedule/pages/state_snapshots.py). Rows are not cleared on reuse: a new owner writes before it reads.

    Args:
        num_rows: rows, the dummy row 0 included.
        layers: per layer, by state_id, the shape and type of one request's state.
        arena: as of KVPool.
    """

    def __init__(
        self,
        num_rows: int,
        layers: Sequence[tuple[tuple[int, ...], torch.dtype]],
        device: torch.device | str,
        arena: Arena | None = None,
    ) -> None:
        self.num_rows = num_rows
        # Layers alike are in one tensor, [layers, rows, …], so that rows of all of them are copied at once.
        counts = Counter((tuple(shape), dtype) for shape, dtype in layers)
        kinds = [((count, _aligned(num_rows, shape, dtype), *shape), dtype) for (shape, dtype), count in counts.items()]
        groups = dict(zip(counts, _zeros(kinds, device, arena), strict=True))
        self._groups = tuple(groups.values())
        following = {like: iter(states) for like, states in groups.items()}
        self._states = [next(following[tuple(shape), dtype])[:num_rows] for shape, dtype in layers]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """[rows, …] of each layer."""
        return [states for group in self._groups for states in group]

    @staticmethod
    def bytes_per_row(layers: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> int:
        """Bytes that one request's states take over all layers."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layers)

    def get_state(self, state_id: int) -> torch.Tensor:
        """[num_rows, *shape] of a layer."""
        states: torch.Tensor = self._states[state_id]
        return states

    def copy_rows(self, copies: np.ndarray) -> None:
        """Copy rows to others in every layer, without waiting: [N, 2] int64, from and to; no two targets are equal. Two
        launches for layers alike, or for as many of them as a bounded copy of their rows holds; one for a single row,
        whose prompt the GPU waits for."""
        if len(copies) == 1:
            ((source, target),) = copies.tolist()
            for states in self._groups:
                states.select(1, target).copy_(states.select(1, source))
            return
        sources, targets = upload(copies.T.copy(), self._groups[0].device)
        for states in self._groups:
            bytes_each = len(copies) * states[0, 0].nbytes
            for layers in states.split(max(1, _COPIED_BYTES // max(1, bytes_each))):
                layers.index_copy_(1, targets, layers.index_select(1, sources))


def _aligned(num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Rows behind which the next layer begins where kernels can read 16 bytes at once."""
    per_row = _ALIGNMENT // math.gcd(_ALIGNMENT, math.prod(shape) * dtype.itemsize)
    return -(-num_rows // per_row) * per_row


def _saturated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast to fp8; beyond its range a plain cast gives NaN on some devices and torch versions."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def _zeros(kinds: Sequence[Kind], device: torch.device | str, arena: Arena | None) -> list[torch.Tensor]:
    """Tensors of these shapes and types, filled with zeros."""
    if arena is not None:
        return arena.zeros(kinds)
    return [_zeros_of(tuple(shape), dtype, device) for shape, dtype in kinds]


def _zeros_of(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """On a CPU pages that the kernel zeroes when they are first written; torch.zeros would write them all now."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = np.zeros(num_bytes, dtype=np.uint8)
    except MemoryError:
        raise DeviceMemoryError(
            f"a part of the KV cache needs {num_bytes / 1e9:.2f} GB, and the system refuses them. Raise the limit of "
            "this process (ulimit -v), or end others."
        ) from None
    return torch.from_numpy(pages).view(dtype).view(shape)
