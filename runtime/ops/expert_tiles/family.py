"""The kernels of experts with many rows, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops.expert_tiles.kernel import BLOCK, ExpertTilesKernel

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces

_TOLERANCE = 2e-2  # ‖ours − theirs‖ / ‖theirs‖ of the worst row; rounding alone is up to 3e-3 in bfloat16
_COUNTS = (BLOCK, 1, 3 * BLOCK // 4, BLOCK // 2)  # rows of the checked blocks: of 4, 1, 3 and 2 units


class Family(KernelFamily):
    """The kernels of each experts' weight that pieces for many tokens multiply tile by tile."""

    def wanted(self, pieces: CalledPieces) -> tuple[ExpertTilesKernel, ...]:
        from mllm_compile.runtime.ops import op

        gated, plain = op("gated_expert_tiles"), op("expert_tiles")
        nodes: list[Any] = [node for piece, _ in pieces for node in piece.graph.nodes if node.target in (gated, plain)]
        found = [(node.args[3].meta["val"].shape, node.target is gated) for node in nodes]
        kernels = (ExpertTilesKernel(int(rows), int(columns), is_gated) for (_, rows, columns), is_gated in found)
        return tuple(dict.fromkeys(kernels))

    def from_json(self, data: Mapping[str, Any]) -> ExpertTilesKernel:
        return ExpertTilesKernel.from_json(data)

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.ops.expert_tiles.ops import load_expert_tiles

        load_expert_tiles([kernel for kernel in kernels if isinstance(kernel, ExpertTilesKernel)], binaries, device)

    def faults(self, kernels: Sequence[CudaKernel], device: torch.device) -> Iterator[str]:
        """Runs each with blocks of few and many units, in bfloat16: float32 would take long."""
        import torch

        from mllm_compile.runtime.ops import op

        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

        places = len(_COUNTS) * BLOCK
        order = torch.arange(places, dtype=torch.int32, device=device).flip(0)
        experts = [index % 2 for index in range(len(_COUNTS))]
        blocks = torch.tensor(list(zip(experts, _COUNTS, strict=True)), dtype=torch.int32, device=device)
        ids = torch.empty(places, 1, device=device)
        for kernel in kernels:
            if not isinstance(kernel, ExpertTilesKernel):
                continue
            x, weight = (
                random(places, kernel.columns) / math.sqrt(kernel.columns),
                random(2, kernel.rows, kernel.columns),
            )
            name = "gated_expert_tiles" if kernel.is_gated else "expert_tiles"
            ours = op(name)(x, order, blocks, weight, 1 if kernel.is_gated else ids)
            for index, (expert, count) in enumerate(zip(experts, _COUNTS, strict=True)):
                rows = slice(index * BLOCK, index * BLOCK + count)
                inputs = x[order[rows] if kernel.is_gated else rows]
                theirs = torch.nn.functional.linear(inputs, weight[expert]).float()
                if kernel.is_gated:
                    gate, up = theirs.chunk(2, -1)
                    theirs = torch.nn.functional.silu(gate) * up
                at = rows if kernel.is_gated else order[rows]
                error = ((ours[at].float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max().item()
                if not error <= _TOLERANCE:
                    yield (
                        f"the experts' linear {kernel.name} is off by {error:.2g} with {count} rows (limit "
                        f"{_TOLERANCE:g}). Set {kernel.switch} to do without it, and report this."
                    )
