"""The kernels of streamed linears, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops.stream_linear.linear import TOKEN_BUCKETS, LinearKind, LinearTiling
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling, tiling_from_json

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces


class Family(KernelFamily):
    """One kernel for each linear of a form for few tokens and each bucket of tokens."""

    def wanted(self, pieces: CalledPieces) -> tuple[LinearTiling, ...]:
        most_tokens: dict[LinearKind, int] = {}
        for piece, tokens in pieces:
            if tokens is not None:
                for kind in _kinds(piece):
                    most_tokens[kind] = max(tokens, most_tokens.get(kind, 0))
        return tuple(
            choose_tiling(kind, tokens)
            for kind, most in most_tokens.items()
            for tokens in TOKEN_BUCKETS
            if tokens <= most
        )

    def from_json(self, data: Mapping[str, Any]) -> LinearTiling:
        return tiling_from_json(data)

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.ops.stream_linear.ops import load_kernels

        load_kernels([kernel for kernel in kernels if isinstance(kernel, LinearTiling)], binaries, device)

    def step_sizes(self, kernels: Sequence[CudaKernel]) -> Sequence[int]:
        return TOKEN_BUCKETS if kernels else ()


def _kinds(piece: Any) -> Iterator[LinearKind]:
    from mllm_compile.runtime.ops import op
    from mllm_compile.runtime.ops.stream_linear.ops import plain_kind, residual_kind

    residual, residual_norm = op("stream_linear_residual"), op("stream_linear_residual_norm")
    for node in piece.graph.nodes:
        if node.target is op("stream_linear"):
            weight, squares, _, gated, *bias = node.args[1:]
            yield plain_kind(_value(weight), None if squares is None else _value(squares), gated, bool(bias))
        elif node.target in (residual, residual_norm):
            yield residual_kind(_value(node.args[1]), norm_next=node.target is residual_norm)


def _value(node: Any) -> torch.Tensor:
    return node.meta["val"]
