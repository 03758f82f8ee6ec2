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
    Parts,
    choose,
    divided,
    gated_kernels,
    parts_of,
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

        ops = [op(name) for name in ("gated_linear", "gated_linear_in_one_order", "gated_linear_lora", "linear_lora")]
        nodes = [node for piece, _ in pieces for node in piece.graph.nodes if node.target in ops]
        kinds: list[tuple[int, int, int, Parts]] = []
        for node in nodes:
            _, weight, *of_adapters = node.args
            rank = int(of_adapters[1].meta["val"].shape[2]) if of_adapters else 0
            rows, columns = map(int, weight.meta["val"].shape)
            kinds.append((rows, columns, rank, parts_of(*of_adapters[3:]) if of_adapters[3:] else ()))
        return tuple(kernel for kind in dict.fromkeys(kinds) for kernel in gated_kernels(*kind))

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
        kinds = {kernel: (kernel.rows, kernel.columns, kernel.rank, kernel.parts) for kernel in gated}
        for kind in dict.fromkeys(kinds.values()):
            rows, columns, rank, parts = kind
            weight = random(rows, columns)
            b_rows = sum(outputs for _, outputs in parts) or rows
            b = random(_SLOTS * b_rows, rank).view(_SLOTS, b_rows, rank) if rank else None
            for kernel, count in _fewest_tokens([one for one, its in kinds.items() if its == kind]):
                x = random(count, columns) / math.sqrt(columns)
                product = torch.nn.functional.linear(x, weight).float()
                if b is None:
                    ours = op("gated_linear")(x, weight)
                else:
                    slots = torch.arange(count, dtype=torch.int32, device=device) % (_SLOTS + 1) - 1
                    of_halves = parts or ((0, rows // 2), (rows // 2, rows // 2))
                    shrunk = random(count, len(of_halves) * rank) / math.sqrt(rank)
                    name = "linear_lora" if parts else "gated_linear_lora"
                    ours = op(name)(x, weight, shrunk, b, slots, *zip(*parts, strict=True))
                    _add(product, shrunk, b, slots, of_halves)
                gate, up = product.chunk(2, -1)
                theirs = product if parts else torch.nn.functional.silu(gate) * up
                off = (ours.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
                error = off.max().item()
                if not error <= _TOLERANCE:
                    yield (
                        f"the kernel {kernel.name} is off by {error:.2g} at {count} tokens (limit "
                        f"{_TOLERANCE:g}). Set {kernel.switch} to do without it, and report this."
                    )


def _add(product: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, parts: Parts) -> None:
    """Adds to [T, N] float32 what adapters do; arguments as linear_lora has them."""
    import torch

    counts = [outputs for _, outputs in parts]
    for slot, of_slot in enumerate(b):
        pairs = zip(shrunk.chunk(len(parts), -1), of_slot.split(counts), parts, strict=True)
        for u, its, (start, outputs) in pairs:
            added = torch.nn.functional.linear(u.float(), its.float())
            product[:, start : start + outputs] += torch.where((slots == slot)[:, None], added, 0)


def _fewest_tokens(kernels: Sequence[GatedKernel]) -> Iterator[tuple[GatedKernel, int]]:
    """Each of a weight's kernels with as few tokens as it is taken for, in tiles that are even, and in others."""
    counts = [units * UNIT_TOKENS for units in range(LEAST_UNITS, MOST_UNITS + 1)]
    for kernel in kernels:
        taken = [count for count in counts if choose(kernels, count) == kernel]
        uneven = [count - 1 for count in taken if divided(count).larger]
        yield from ((kernel, count) for count in (*taken[:1], *uneven[:1]))
