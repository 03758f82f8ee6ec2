"""The kernel of small sums over ranks, as the compiler, the stored program and the checks see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.collectives.push_kernel import PushKernel
from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.json_data import from_json

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces

_CHECKED_SIZES = (8, 4096, 131072)  # elements, each several times: three buffers take turns
_CHECKED_RANKS = 2


class Family(KernelFamily):
    """One kernel, where pieces sum bfloat16 over ranks."""

    def wanted(self, pieces: CalledPieces) -> tuple[PushKernel, ...]:
        import torch

        from mllm_compile.runtime.ops import op

        summed = [
            node.meta["val"] for piece, _ in pieces for node in piece.graph.nodes if node.target is op("all_reduce")
        ]
        is_ours = any(val.dtype is torch.bfloat16 and val.device.type == "cuda" for val in summed)
        return (PushKernel(),) if is_ours else ()

    def from_json(self, data: Mapping[str, Any]) -> PushKernel:
        return from_json(PushKernel, {name: value for name, value in data.items() if name != "source"})

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.collectives.push import load_push_kernel

        for kernel in kernels:
            if isinstance(kernel, PushKernel):
                load_push_kernel(kernel, binaries, device)

    def faults(self, kernels: Sequence[CudaKernel], device: torch.device) -> Iterator[str]:
        """Runs two ranks on this one device, on two streams."""
        import torch

        from mllm_compile.runtime.collectives.push import PushedSums, new_buffers

        if not kernels:
            return
        buffers = [new_buffers(_CHECKED_RANKS, device) for _ in range(_CHECKED_RANKS)]
        places = [one.data_ptr() for one in buffers]
        ranks = [PushedSums(rank, places, device) for rank in range(_CHECKED_RANKS)]
        streams = [torch.cuda.Stream(device) for _ in ranks]
        generator = torch.Generator(device).manual_seed(0)
        for size in _CHECKED_SIZES * 3:
            parts = [torch.randn(size, generator=generator, device=device).bfloat16() for _ in ranks]
            parts[0][0] = parts[1][0] = -0.0
            torch.cuda.synchronize(device)
            sums = []
            for rank, part, stream in zip(ranks, parts, streams, strict=True):
                with torch.cuda.stream(stream):
                    sums.append(rank.sum(part))
            torch.cuda.synchronize(device)
            wanted = (parts[0].float() + parts[1].float()).bfloat16()
            if not all(torch.equal(one, wanted) for one in sums):
                yield f"the sum of {size} numbers over ranks is wrong. Set {kernels[0].switch}, and report this."
                return
