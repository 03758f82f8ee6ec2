"""Calls the library of paged attention (attend.cpp): layers and batches as its structures, tensors as addresses.

Shape legend: T tokens, R requests, H query heads, Hk KV heads, D head dim, Dv value head dim.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.layer import AttentionLayer

_INT64, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_OPERANDS = struct.Struct("17q")  # as Operands has them: addresses and strides are 64 bits each
_NOTHING_NEW = (0,) * 6  # where keys and values are in the cache


class _Layer(ctypes.Structure):
    _fields_ = (
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_dim", _INT64),
        ("v_head_dim", _INT64),
        ("window_left", _INT64),
        ("chunk", _INT64),
        ("is_bf16", _INT64),
        ("values_are_keys", _INT64),
        ("sinks", _POINTER),
        ("slopes", _POINTER),
        ("scale", _FLOAT),
        ("soft_cap", _FLOAT),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("parts", _POINTER),
        ("table", _POINTER),
        ("table_width", _INT64),
        ("num_parts", _INT64),
        ("num_decodes", _INT64),
        ("num_threads", _INT64),
    )


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A batch as the library reads it, for all layers that look at its tokens alike.

    Attributes:
        parts: [N, 5] int32: row of the table, first row of T, number of queries, tokens up to the last of them, and
            whether they see each other in both directions; the decodes first.
        table: [rows, max_context_len] int32: slot of each position.
        address: of the library's structure, which `_struct` holds.
    """

    parts: np.ndarray
    table: torch.Tensor
    _struct: _Batch
    address: int

    @classmethod
    def of(cls, parts: np.ndarray, table: torch.Tensor, num_decodes: int) -> PagedBatch:
        """
        Args:
            num_decodes: leading parts of one query each that may begin with the same slots.
        """
        parts = np.ascontiguousarray(parts, dtype=np.int32)
        given = _Batch(
            parts.ctypes.data, table.data_ptr(), table.stride(0), len(parts), num_decodes, torch.get_num_threads()
        )
        return cls(parts, table, given, ctypes.addressof(given))


class PagedAttention:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.paged_attention
        self._call.argtypes = (_POINTER, _POINTER, _POINTER)

    def of(self, layer: AttentionLayer, dtype: torch.dtype) -> PagedLayer:
        """The attention of a layer; `dtype` is its tensors' and its cache's."""
        return PagedLayer(self._call, layer, dtype)


class PagedLayer:
    """The attention of one layer. Used by one thread."""

    def __init__(self, call: Callable[[int, int, int], int], layer: AttentionLayer, dtype: torch.dtype) -> None:
        sinks = None if layer.sink_logits is None else layer.sink_logits.float().contiguous()
        slopes = torch.tensor(layer.alibi_slopes, dtype=torch.float32) if layer.alibi_slopes else None
        self._held = sinks, slopes
        self._call, self._dtype, self._id = call, dtype, layer.layer_id
        self._layer = _Layer(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.v_head_dim,
            layer.window_left,
            layer.chunk,
            dtype is torch.bfloat16,
            layer.is_latent,
            None if sinks is None else sinks.data_ptr(),
            None if slopes is None else slopes.data_ptr(),
            layer.sm_scale,
            layer.logits_soft_cap,
        )
        self._operands = ctypes.create_string_buffer(_OPERANDS.size)
        self._addresses = ctypes.addressof(self._layer), ctypes.addressof(self._operands)

    def run(self, inputs: AttentionInputs, batch: PagedBatch, num_shared: int = 0) -> None:
        """Writes `inputs.k` and `inputs.v` at `inputs.slots`, where there are some, and attends into `inputs.out`.

        Args:
            num_shared: first tokens that all decodes have in the same slots.

        Raises:
            MemoryError: there is no room for sums.
        """
        keys, values = inputs.batch.token_to_kv_pool.get_pages(self._id)
        slots, new, at = inputs.slots, _NOTHING_NEW, 0
        q, places = self._placed(inputs.q)
        if slots is not None:
            _k, of_keys = self._placed(inputs.k)
            _v, of_values = self._placed(inputs.v)
            new, at = of_keys + of_values, slots.data_ptr()
        out = inputs.out if inputs.out.dtype is self._dtype else torch.empty_like(inputs.out, dtype=self._dtype)
        _OPERANDS.pack_into(
            self._operands,
            0,
            *places,
            out.data_ptr(),
            *out.stride()[:2],
            *new,
            keys.data_ptr(),
            values.data_ptr(),
            at,
            q.shape[0],
            num_shared,
        )
        layer, operands = self._addresses
        # The tensors that are read live until the call has ended.
        if self._call(layer, batch.address, operands):
            raise MemoryError("attention on the CPU has no room for its sums: lower runtime.max_running_requests")
        if out is not inputs.out:
            inputs.out.copy_(out)

    def _placed(self, rows: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """The rows in the cache's type, with the last dimension in a row, as most are already; and where they are, as
        the library has it."""
        if rows.dtype is not self._dtype:
            rows = rows.to(self._dtype)
        of_token, of_head, of_number = rows.stride()
        if of_number != 1:
            rows = rows.contiguous()
            of_token, of_head, _ = rows.stride()
        return rows, (rows.data_ptr(), of_token, of_head)
