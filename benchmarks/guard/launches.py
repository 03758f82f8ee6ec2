"""Launches of a layer's linears on Hopper, timed on a CPU: a driver that does nothing stands for the GPU's.

A start launches every kernel of a model for each graph that it captures, so the host's part of a launch is most of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from benchmarks.guard.stage import Round, Tree

_WIDTH, _QKV, _INNER = 4096, 6144, 12288  # Qwen3-8B's
_TOKENS, _LAYERS = 8, 36
_NO_GPU = -1  # what a tensor of the CPU says of its device


class _Driver:
    """Answers every call with success."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0


def launches(tree: Tree) -> Round:
    """The linears of Qwen3-8B's layers at 8 tokens."""
    import torch

    from mllm_compile.runtime.ops.stream_linear.family import Family
    from mllm_compile.runtime.ops.stream_linear.linear import bucket_of
    from mllm_compile.runtime.ops.stream_linear.ops import STREAMED

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    x, inner, norm = empty(_TOKENS, _WIDTH), empty(_TOKENS, _INNER), empty(_WIDTH)
    qkv, o, gate_up, down = (
        empty(*shape) for shape in ((_QKV, _WIDTH), (_WIDTH, _WIDTH), (2 * _INNER, _WIDTH), (_WIDTH, _INNER))
    )
    blocks = STREAMED.residual_kind((o,), norm_next=True).next_blocks
    squares = empty(_TOKENS, blocks, dtype=torch.float32)

    def layers() -> None:
        with _driven(torch):
            for _ in range(_LAYERS):
                STREAMED._plain(x, qkv, squares, 1e-6, False)
                STREAMED._residual_norm(x, o, x, norm)
                STREAMED._plain(x, gate_up, squares, 1e-6, True)
                STREAMED._residual_norm(inner, down, x, norm)

    kinds = [STREAMED.plain_kind((qkv,), squares, False, False, False)]
    kinds += [STREAMED.plain_kind((gate_up,), squares, True, False, False)]
    kinds += [STREAMED.residual_kind((one,), norm_next=True) for one in (o, down)]
    tilings = [Family().choose(kind, bucket_of(_TOKENS)) for kind in kinds]
    with _driven(torch):
        STREAMED.load_kernels(tilings, {tiling.name: b"" for tiling in tilings}, torch.device("cpu"))
    layers()
    return Round(layers)


@contextmanager
def _driven(torch: Any) -> Iterator[None]:
    from mllm_compile.runtime.cuda import driver

    with (
        patch.object(driver, "_driver", _Driver),
        patch.object(driver, "_context", lambda device: ctypes.c_void_p()),
        patch.object(torch.cuda, "current_device", lambda: _NO_GPU),
        patch.object(torch.cuda, "device", lambda device: nullcontext()),
        patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True),
    ):
        yield
