"""The kernels of experts with few tokens, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.ops.stream_experts.kernel import DownKernel, ExpertsKernel, GateUpKernel

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces

_KERNELS: dict[str, type[ExpertsKernel]] = {kernel.source: kernel for kernel in (GateUpKernel, DownKernel)}


class Family(KernelFamily):
    """Two kernels for each kind of experts in variants for few tokens."""

    def wanted(self, pieces: CalledPieces) -> tuple[ExpertsKernel, ...]:
        return tuple(dict.fromkeys(kernel for piece, _ in pieces for kernel in _called(piece)))

    def from_json(self, data: Mapping[str, Any]) -> ExpertsKernel:
        return from_json(_KERNELS[data["source"]], {name: value for name, value in data.items() if name != "source"})

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.ops.stream_experts.ops import load_expert_kernels

        load_expert_kernels([kernel for kernel in kernels if isinstance(kernel, ExpertsKernel)], binaries, device)


def _called(piece: Any) -> Iterator[ExpertsKernel]:
    from mllm_compile.runtime.ops import op
    from mllm_compile.runtime.ops.stream_experts.ops import Router, down_kernel, up_kernel

    for node in piece.graph.nodes:
        values = [getattr(arg, "meta", {}).get("val", arg) for arg in node.args]
        if node.target is op("stream_expert_up"):
            yield up_kernel(values[1], values[2], Router(*values[4:]))
        elif node.target is op("stream_expert_down"):
            yield down_kernel(values[1], False, Router(*values[3:]))
        elif node.target is op("stream_expert_down_norm"):
            yield down_kernel(values[1], True, Router(*values[5:]), values[4])
