"""The kernels of streamed linears, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops.stream_linear.linear import TOKEN_BUCKETS, LinearKind, LinearTiling
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling, tiling_from_json

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces
    from mllm_compile.runtime.ops.stream_linear.streamed_ops import StreamedOps


class StreamedFamily(KernelFamily):
    """One kernel for each linear of a variant for few tokens and each bucket of tokens.

    Attributes:
        prefix: of the ops.
        module: the module that defines them as STREAMED.
    """

    prefix: ClassVar[str]
    module: ClassVar[str]

    @abstractmethod
    def choose(self, kind: Any, tokens: int) -> LinearTiling:
        """Returns the tiling for a bucket of tokens."""

    def wanted(self, pieces: CalledPieces) -> tuple[LinearTiling, ...]:
        most_tokens: dict[LinearKind, int] = {}
        for piece, tokens in pieces:
            if tokens is not None:
                for kind in self._kinds(piece):
                    most_tokens[kind] = max(tokens, most_tokens.get(kind, 0))
        return tuple(
            self.choose(kind, tokens)
            for kind, most in most_tokens.items()
            for tokens in TOKEN_BUCKETS
            if tokens <= min(most, self._ops().launch_tokens)
        )

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        self._ops().load_kernels([one for one in kernels if isinstance(one, LinearTiling)], binaries, device)

    def step_sizes(self, kernels: Sequence[CudaKernel]) -> Sequence[int]:
        return sorted({one.tokens for one in kernels if isinstance(one, LinearTiling)})

    def _kinds(self, piece: Any) -> Iterator[LinearKind]:
        from mllm_compile.runtime.ops import op

        names = {op(self.prefix + name): name for name in ("", "_residual", "_residual_norm")}
        for node in piece.graph.nodes:
            if node.target in names:
                yield self._ops().kind_of_call(node, names[node.target])

    def _ops(self) -> StreamedOps:
        """Imported when the ops are needed: the import defines them."""
        streamed: StreamedOps = importlib.import_module(self.module).STREAMED
        return streamed


class Family(StreamedFamily):
    """The kernels of plain weights."""

    prefix: ClassVar[str] = "stream_linear"
    module: ClassVar[str] = "mllm_compile.runtime.ops.stream_linear.ops"

    def choose(self, kind: LinearKind, tokens: int) -> LinearTiling:
        return choose_tiling(kind, tokens)

    def from_json(self, data: Mapping[str, Any]) -> LinearTiling:
        return tiling_from_json(data)
