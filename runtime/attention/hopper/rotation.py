"""The argument of rotation.cuh: where queries, new keys and values are, and what norms and rotates them."""

from __future__ import annotations

import ctypes

import torch

from mllm_compile.runtime.attention.capture import RopeInputs

_POINTERS = ("k", "v", "q_weight", "k_weight", "cos", "sin", "keys", "values")
_STRIDES = ("q_stride", "k_stride", "v_stride")


class _Argument(ctypes.Structure):
    """`struct Rotation` of rotation.cuh. Strides are from token to token, in pairs of columns."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _STRIDES),
        ("eps", ctypes.c_float),
        ("k_factor", ctypes.c_float),
        ("v_factor", ctypes.c_float),
    )


class Rotation:
    """
    Attributes:
        q: [T, H, D], where the kernel reads queries: heads are in one row, tokens may have any stride.
        argument: the launch's. It holds addresses: the caller keeps the tensors alive.
    """

    def __init__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rope_inputs: RopeInputs | None
    ) -> None:
        """
        Args:
            q: [T, H, D]; contiguous, or before the rotation.
            keys, values: [P, Hk, D], the cache.
        """
        self.q = _with_whole_heads(q)
        if rope_inputs is None:
            self.argument = _Argument(q_stride=_token_stride(self.q))
            return
        self._k, self._v = map(_with_whole_heads, (rope_inputs.k[0], rope_inputs.v))
        tensors = (
            self._k,
            self._v,
            rope_inputs.q_weight,
            rope_inputs.k_weight,
            rope_inputs.cos,
            rope_inputs.sin,
            keys,
            values,
        )
        self.argument = _Argument(
            **{
                name: None if tensor is None else tensor.data_ptr()
                for name, tensor in zip(_POINTERS, tensors, strict=True)
            },
            **{name: _token_stride(x) for name, x in zip(_STRIDES, (self.q, self._k, self._v), strict=True)},
            eps=rope_inputs.eps,
            k_factor=1.0,
            v_factor=1.0,
        )


def _with_whole_heads(x: torch.Tensor) -> torch.Tensor:
    """Makes [T, H, D] have a token's heads in one row, as a projection's output has them."""
    has_rows = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 2 == 0
    return x if has_rows else x.contiguous()


def _token_stride(x: torch.Tensor) -> int:
    return x.stride(0) // 2
