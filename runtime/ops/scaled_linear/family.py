"""The kernels of linears in fp8, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops.scaled_linear.kernel import (
    BUCKETS,
    FEWEST_TOKENS,
    ScaledTiling,
    is_taken,
    scaled_kernels,
    tiling_from_json,
)

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces

_TOLERANCE = 1e-2  # ‖ours − theirs‖ / ‖theirs‖ of the worst token; rounding both is up to 6e-3


class Family(KernelFamily):
    """The kernels of each weight with a scale a row that pieces multiply in fp8."""

    def wanted(self, pieces: CalledPieces) -> tuple[ScaledTiling, ...]:
        from mllm_compile.runtime.ops import op

        weights = [
            node.args[2].meta["val"]
            for piece, _ in pieces
            for node in piece.graph.nodes
            if node.target is op("scaled_linear") and node.args[3].meta["val"].shape[1] == 1
        ]
        shapes = dict.fromkeys(tuple(map(int, weight.shape)) for weight in weights)
        return tuple(
            kernel for rows, columns in shapes if is_taken(rows, columns) for kernel in scaled_kernels(rows, columns)
        )

    def from_json(self, data: Mapping[str, Any]) -> ScaledTiling:
        return tiling_from_json(data)

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.ops.scaled_linear.ops import load_scaled_kernels

        load_scaled_kernels([kernel for kernel in kernels if isinstance(kernel, ScaledTiling)], binaries, device)

    def faults(self, kernels: Sequence[CudaKernel], device: torch.device) -> Iterator[str]:
        """Runs each with as many tokens as it holds, and as few, against bfloat16, which has their operands exactly."""
        import torch

        from mllm_compile.runtime.ops import op

        generator = torch.Generator(device).manual_seed(0)

        def random(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
            return values.to(torch.float8_e4m3fn)

        def scales(count: int) -> torch.Tensor:
            return torch.rand(count, 1, generator=generator, device=device) + 0.5

        scaled = [kernel for kernel in kernels if isinstance(kernel, ScaledTiling)]
        for kind in dict.fromkeys(kernel.kind for kernel in scaled):
            values, of_rows = random(kind.rows, kind.columns), scales(kind.rows) / math.sqrt(kind.columns)
            for kernel in (one for one in scaled if one.kind == kind):
                fewest = max((bucket + 1 for bucket in BUCKETS if bucket < kernel.tokens), default=FEWEST_TOKENS)
                for count in (kernel.tokens, fewest):
                    x, of_tokens = random(count, kind.columns), scales(count)
                    products = torch.nn.functional.linear(x.bfloat16(), values.bfloat16()).float()
                    theirs = products * of_tokens * of_rows.t()
                    off = op("scaled_linear")(x, of_tokens, values, of_rows).float() - theirs
                    error = (off.norm(dim=-1) / theirs.norm(dim=-1)).max().item()
                    if not error <= _TOLERANCE:
                        yield (
                            f"the linear in fp8 {kernel.name} is off by {error:.2g} at {count} tokens (limit "
                            f"{_TOLERANCE:g}). Set {kernel.switch} to do without it, and report this."
                        )
