"""The kernels of experts with few rows each, as the compiler and the stored program see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.ops.stream_expert_rows.kernel import ExpertRowsKernel

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces


class Family(KernelFamily):
    """A kernel for each experts' linear and size of blocks in variants for few tokens."""

    def wanted(self, pieces: CalledPieces) -> tuple[ExpertRowsKernel, ...]:
        from mllm_compile.runtime.ops import op

        called = op("stream_expert_rows")
        nodes: list[Any] = [node for piece, _ in pieces for node in piece.graph.nodes if node.target == called]
        return tuple(dict.fromkeys(map(_kernel_of, nodes)))

    def from_json(self, data: Mapping[str, Any]) -> ExpertRowsKernel:
        return from_json(ExpertRowsKernel, {name: value for name, value in data.items() if name != "source"})

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.ops.stream_expert_rows.ops import load_expert_rows

        load_expert_rows([kernel for kernel in kernels if isinstance(kernel, ExpertRowsKernel)], binaries, device)


def _kernel_of(node: Any) -> ExpertRowsKernel:
    from mllm_compile.runtime.ops.stream_expert_rows.ops import rows_kernel

    _, _, _, values, _, bias, num_chosen, of_tokens, swiglu, _, _, is_early, block = node.args
    return rows_kernel(values.meta["val"], bias, num_chosen, of_tokens, swiglu, is_early, block)
