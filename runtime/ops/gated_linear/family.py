"""The kernels of gated linears, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.cuda.units import UNIT_ROWS as UNIT_TOKENS
from mllm_compile.runtime.ops.gated_linear.kernel import (
    LEAST_UNITS,
    MOST_UNITS,
    GatedKernel,
    choose,
    divided,
    gated_kernels,
)

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces

_SLOTS = 3  # of adapters that are tried
_TOLERANCE = 2e-2  # ‖ours − theirs‖ / ‖theirs‖ of the worst token; rounding alone is up to 3e-3 in bfloat16


class Family(KernelFamily):
    """The kernels of each weight that pieces for many tokens multiply and activate at once."""

    def wanted(self, pieces: CalledPieces) -> tuple[GatedKernel, ...]:
        from mllm_compile.runtime.ops import op

        ops = [op(name) for name in ("gated_linear", "gated_linear_in_one_order", "gated_linear_lora")]
        calls = [
            (node.args[1], node.args[3:4]) for piece, _ in pieces for node in piece.graph.nodes if node.target in ops
        ]
        shapes = (
            (*weight.meta["val"].shape, *(b.meta["val"].shape[2] for b in of_slots)) for weight, of_slots in calls
        )
        return tuple(kernel for shape in dict.fromkeys(shapes) for kernel in gated_kernels(*map(int, shape)))

    def from_json(self, data: Mapping[str, Any]) -> GatedKernel:
        return GatedKernel.from_json(data)

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.ops.gated_linear.ops import load_gated_kernels

        load_gated_kernels([kernel for kernel in kernels if isinstance(kernel, GatedKernel)], binaries, device)

    def faults(self, kernels: Sequence[CudaKernel], device: torch.device) -> Iterator[str]:
        """Runs each with its fewest tokens, and uneven tiles, against bfloat16: float32 would take a second."""
        import torch

        from mllm_compile.runtime.ops import op

        generator = torch.Generator(device).manual_seed(0)

        def random(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)

        gated = [kernel for kernel in kernels if isinstance(kernel, GatedKernel)]
        for rows, columns, rank in dict.fromkeys((kernel.rows, kernel.columns, kernel.rank) for kernel in gated):
            weight = random(rows, columns)
            b = random(_SLOTS * rows, rank).view(_SLOTS, rows, rank) if rank else None
            shape = rows, columns, rank
            of_weight = [kernel for kernel in gated if (kernel.rows, kernel.columns, kernel.rank) == shape]
            for kernel, count in _fewest_tokens(of_weight):
                x = random(count, columns) / math.sqrt(columns)
                product = torch.nn.functional.linear(x, weight).float()
                if b is None:
                    ours = op("gated_linear")(x, weight)
                else:
                    slots = torch.arange(count, dtype=torch.int32, device=device) % (_SLOTS + 1) - 1
                    shrunk = random(count, 2 * rank) / math.sqrt(rank)
                    ours = op("gated_linear_lora")(x, weight, shrunk, b, slots)
                    product += _added(shrunk, b, slots)
                gate, up = product.chunk(2, -1)
                theirs = torch.nn.functional.silu(gate) * up
                off = (ours.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
                error = off.max().item()
                if not error <= _TOLERANCE:
                    yield (
                        f"the gated linear {kernel.name} is off by {error:.2g} at {count} tokens (limit "
                        f"{_TOLERANCE:g}). Set {kernel.switch} to do without it, and report this."
                    )


def _added(shrunk: torch.Tensor, b: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[T, N] float32 of what adapters add; arguments as gated_linear_lora has them."""
    import torch

    added = torch.zeros(shrunk.shape[0], b.shape[1], device=b.device)
    for slot, of_slot in enumerate(b):
        halves = zip(shrunk.chunk(2, -1), of_slot.chunk(2), strict=True)
        its = torch.cat([torch.nn.functional.linear(u.float(), half.float()) for u, half in halves], -1)
        added = torch.where((slots == slot)[:, None], its, added)
    return added


def _fewest_tokens(kernels: Sequence[GatedKernel]) -> Iterator[tuple[GatedKernel, int]]:
    """Each of a weight's kernels with as few tokens as it is taken for, in tiles that are even, and in others."""
    counts = [units * UNIT_TOKENS for units in range(LEAST_UNITS, MOST_UNITS + 1)]
    for kernel in kernels:
        taken = [count for count in counts if choose(kernels, count) == kernel]
        uneven = [count - 1 for count in taken if divided(count).larger]
        yield from ((kernel, count) for count in (*taken[:1], *uneven[:1]))
