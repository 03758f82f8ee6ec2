"""The kernels of streamed fp8 linears, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops.stream_fp8.linear import Fp8Kind, Fp8Tiling
from mllm_compile.runtime.ops.stream_fp8.shapes import FP8_BUCKETS, choose_tiling, tiling_from_json

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces


class Family(KernelFamily):
    """One kernel for each fp8 linear of a form for few tokens and each bucket of tokens."""

    def wanted(self, pieces: CalledPieces) -> tuple[Fp8Tiling, ...]:
        most_tokens: dict[Fp8Kind, int] = {}
        for piece, tokens in pieces:
            if tokens is not None:
                for kind in _kinds(piece):
                    most_tokens[kind] = max(tokens, most_tokens.get(kind, 0))
        return tuple(
            choose_tiling(kind, tokens)
            for kind, most in most_tokens.items()
            for tokens in FP8_BUCKETS
            if tokens <= most
        )

    def from_json(self, data: Mapping[str, Any]) -> Fp8Tiling:
        return tiling_from_json(data)

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.ops.stream_fp8.ops import load_kernels

        load_kernels([kernel for kernel in kernels if isinstance(kernel, Fp8Tiling)], binaries, device)

    def step_sizes(self, kernels: Sequence[CudaKernel]) -> Sequence[int]:
        return FP8_BUCKETS if kernels else ()


def _kinds(piece: Any) -> Iterator[Fp8Kind]:
    from mllm_compile.runtime.ops import op
    from mllm_compile.runtime.ops.stream_fp8.ops import plain_kind, residual_kind

    residual, residual_norm = op("stream_fp8_linear_residual"), op("stream_fp8_linear_residual_norm")
    for node in piece.graph.nodes:
        if node.target is op("stream_fp8_linear"):
            values, scales, squares, _, gated, *bias = node.args[1:]
            of_norm = None if squares is None else squares.meta["val"]
            yield plain_kind(values.meta["val"], scales.meta["val"], of_norm, gated, bool(bias))
        elif node.target in (residual, residual_norm):
            values, scales = (operand.meta["val"] for operand in node.args[1:3])
            yield residual_kind(values, scales, norm_next=node.target is residual_norm)
