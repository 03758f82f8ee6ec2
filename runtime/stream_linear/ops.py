"""The ops that pieces for few tokens call on Hopper: schemas, fakes, and launches of the runtime's own binaries.

Registered as runtime/ops.py has it. What a kernel computes is kernel.cu's; a norm between two linears works as in
runtime/few_token_ops.py: the first linear leaves h · norm_weight and sums of squares of h, the second one multiplies by
the norm's factor.

Shape legend: T tokens, N outputs and K inputs of a linear, B = N / 32 sums of squares a token.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mllm_compile.runtime.errors import ArtifactError
from mllm_compile.runtime.stream_linear.driver import Argument, Kernel, TensorMap
from mllm_compile.runtime.stream_linear.shapes import (
    NORM_ROWS,
    TOKEN_BUCKETS,
    LinearKind,
    LinearTiling,
    bucket_of,
    choose_tiling,
)
from mllm_compile.runtime.stream_linear.source import KERNEL

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")


@dataclass(frozen=True)
class _Loaded:
    tiling: LinearTiling
    binary: bytes
    kernel: Kernel

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        operands: Iterable[torch.Tensor | None],
        eps: float,
        num_tokens: int,
    ) -> None:
        tiling = self.tiling
        box_rows = tiling.rows // 2 if tiling.kind.gated else tiling.rows
        maps = [TensorMap(weight, box_rows), TensorMap(x.view(num_tokens, -1), tiling.tokens)]
        pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in operands]
        arguments: list[Argument] = [
            *(one.address for one in maps),
            *pointers,
            ctypes.c_float(eps),
            ctypes.c_int(num_tokens),
        ]
        self.kernel.launch(tiling.num_blocks, tiling.num_threads, arguments)


_LOADED: dict[tuple[int, LinearKind, int], _Loaded] = {}  # by device index, linear and bucket


def binary_name(kind: LinearKind, tokens: int) -> str:
    """The file of one kernel, without its suffix."""
    return f"{kind.name}_t{tokens}"


def load_kernels(kinds: Sequence[LinearKind], binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes the kernels of these linears those that the ops launch on `device`.

    Args:
        binaries: by binary_name; checked by the caller: they are executed.

    Raises:
        ArtifactError: one is missing.
        DeviceError: one cannot be loaded.
    """
    if not kinds:
        return
    with torch.cuda.device(device):
        for kind in kinds:
            for tokens in TOKEN_BUCKETS:
                name = binary_name(kind, tokens)
                if name not in binaries:
                    raise ArtifactError(f"the runtime holds no kernel {name}; compile the model again")
                key, binary = (torch.cuda.current_device(), kind, tokens), binaries[name]
                if key not in _LOADED or _LOADED[key].binary != binary:  # not again for every engine of a process
                    tiling = choose_tiling(kind, tokens)
                    _LOADED[key] = _Loaded(tiling, binary, Kernel(binary, KERNEL, tiling.shared_bytes))


def _loaded(x: torch.Tensor, kind: LinearKind, num_tokens: int) -> _Loaded:
    try:
        return _LOADED[x.get_device(), kind, bucket_of(num_tokens)]
    except KeyError:
        raise RuntimeError(f"no kernel is loaded for the linear {kind.name} on {x.device}: call load_kernels") from None


def _num_tokens(x: torch.Tensor) -> int:
    return math.prod(x.shape[:-1])


def _for_tma(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous and at an address that TMA takes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


# mllm::stream_linear --------------------------------------------------------------------------------------------------

_LIBRARY.define("stream_linear(Tensor x, Tensor weight, Tensor? squares, float eps, bool gated) -> Tensor")


def plain_kind(weight: torch.Tensor, squares: torch.Tensor | None, gated: bool) -> LinearKind:
    """The linear of a call of stream_linear."""
    rows, columns = weight.shape
    return LinearKind(int(rows), int(columns), 0 if squares is None else int(squares.shape[-1]), gated=gated)


def stream_linear(
    x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None, eps: float, gated: bool
) -> torch.Tensor:
    """x · weightᵀ, of a norm and gated if so asked.

    Args:
        x: […, K] bfloat16, up to MAX_STREAMED_TOKENS of them.
        weight: [N, K]; of a gated one [gate rows; up rows], [2N, K].
        squares: […, B] float32: x is h · norm_weight and these are the sums of squares of h; None: x is taken as it is.
        eps: the norm's.
        gated: silu(gate) * up.

    Returns:
        […, N] bfloat16.
    """
    x = _for_tma(x)
    out = _new_output(x, weight, gated)
    num_tokens = _num_tokens(x)
    launch = _loaded(x, plain_kind(weight, squares, gated), num_tokens)
    launch(x, weight, (squares, None, None, out, None, None), eps, num_tokens)
    return out


def _new_output(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]))


_LIBRARY.impl("stream_linear", stream_linear, "CUDA")
torch.library.register_fake(
    "mllm::stream_linear", lambda x, weight, squares, eps, gated: _new_output(x, weight, gated), lib=_LIBRARY
)

# mllm::stream_linear_residual -----------------------------------------------------------------------------------------

_LIBRARY.define("stream_linear_residual(Tensor x, Tensor weight, Tensor residual) -> Tensor")


def stream_linear_residual(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual + x · weightᵀ: x […, K], weight [N, K], residual […, N], all bfloat16 → […, N]."""
    x, residual = _for_tma(x), residual.contiguous()
    out = torch.empty_like(residual)
    num_tokens = _num_tokens(x)
    launch = _loaded(x, residual_kind(weight, norm_next=False), num_tokens)
    launch(x, weight, (None, residual, None, out, None, None), 0.0, num_tokens)
    return out


def residual_kind(weight: torch.Tensor, norm_next: bool) -> LinearKind:
    """The linear of a call of stream_linear_residual or stream_linear_residual_norm."""
    rows, columns = weight.shape
    return LinearKind(int(rows), int(columns), residual=True, norm_next=norm_next)


_LIBRARY.impl("stream_linear_residual", stream_linear_residual, "CUDA")
torch.library.register_fake(
    "mllm::stream_linear_residual", lambda x, weight, residual: torch.empty_like(residual), lib=_LIBRARY
)

# mllm::stream_linear_residual_norm ------------------------------------------------------------------------------------

_LIBRARY.define(
    "stream_linear_residual_norm(Tensor x, Tensor weight, Tensor residual, Tensor norm_weight)"
    " -> (Tensor, Tensor, Tensor)"
)


def stream_linear_residual_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h = residual + x · weightᵀ, h · norm_weight, and sums of squares of h.

    Args:
        x: […, K]; weight: [N, K]; residual: […, N]; norm_weight: [N]; all bfloat16.

    Returns:
        The two […, N] bfloat16, the sums […, B] float32: stream_linear goes on from the latter two.
    """
    x, residual = _for_tma(x), residual.contiguous()
    out, scaled, squares = _norm_outputs(residual)
    num_tokens = _num_tokens(x)
    launch = _loaded(x, residual_kind(weight, norm_next=True), num_tokens)
    launch(x, weight, (None, residual, norm_weight, out, scaled, squares), 0.0, num_tokens)
    return out, scaled, squares


def _norm_outputs(residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *tokens, rows = residual.shape
    squares = residual.new_empty((*tokens, rows // NORM_ROWS), dtype=torch.float32)
    return (
        torch.empty(residual.shape, dtype=residual.dtype, device=residual.device),
        residual.new_empty(residual.shape),
        squares,
    )


_LIBRARY.impl("stream_linear_residual_norm", stream_linear_residual_norm, "CUDA")
torch.library.register_fake(
    "mllm::stream_linear_residual_norm",
    lambda x, weight, residual, norm_weight: _norm_outputs(residual),
    lib=_LIBRARY,
)
