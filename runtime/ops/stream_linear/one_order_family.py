"""The kernels of few rows in one order, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind
from mllm_compile.runtime.ops.stream_linear.undivided import (
    BUCKETS,
    UndividedTiling,
    bytes_ahead,
    choose_undivided,
)

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces


class Family(KernelFamily):
    """One kernel for each linear in one order and each bucket of few rows."""

    def wanted(self, pieces: CalledPieces) -> tuple[UndividedTiling, ...]:
        from mllm_compile.runtime.ops import op

        plain, gated = op("linear_in_one_order"), op("gated_linear_in_one_order")
        calls = (node for piece, _ in pieces for node in piece.graph.nodes if node.target in (plain, gated))
        kinds = dict.fromkeys((_kind_of(node.args, node.target is gated), _bytes_ahead(node.args)) for node in calls)
        return tuple(choose_undivided(kind, tokens, ahead) for kind, ahead in kinds for tokens in BUCKETS)

    def from_json(self, data: Mapping[str, Any]) -> UndividedTiling:
        return from_json(UndividedTiling, {name: value for name, value in data.items() if name != "source"})

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.ops.stream_linear.one_order_ops import load_undivided

        load_undivided([one for one in kernels if isinstance(one, UndividedTiling)], binaries, device)

    def step_sizes(self, kernels: Sequence[CudaKernel]) -> Sequence[int]:
        return BUCKETS if kernels else ()


def _bytes_ahead(operands: tuple[Any, ...]) -> int:
    """Bytes of the next linear's weight that a call in a graph asks for."""
    ahead = operands[3] if len(operands) > 3 else None
    return 0 if ahead is None else bytes_ahead(*map(int, ahead.meta["val"].shape))


def _kind_of(operands: tuple[Any, ...], is_gated: bool) -> LinearKind:
    """The linear of a call in a graph."""
    rows, columns = operands[1].meta["val"].shape
    return LinearKind(int(rows), int(columns), gated=is_gated, bias=not is_gated and operands[2] is not None)
