"""The kernels of adapters with whole rows in a cluster, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops.lora_clusters.kernel import ClusterKernel, NormKernel, ShrinkKernel

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces

_KINDS: dict[str, type[ClusterKernel]] = {kind.source: kind for kind in (NormKernel, ShrinkKernel)}
_SLOTS, _EPS = 3, 1e-6  # of adapters that are tried
_TOLERANCE = 2e-2  # ‖ours − theirs‖ / ‖theirs‖ of the worst token; rounding alone is up to 5e-3 in bfloat16


class Family(KernelFamily):
    """A kernel for each size of A, and for each size of norm and of adapters ahead of it and behind."""

    def wanted(self, pieces: CalledPieces) -> tuple[ClusterKernel, ...]:
        from mllm_compile.runtime.ops import op

        norm, shrink = op("lora_norm_in_clusters"), op("lora_shrink_in_clusters")
        found: list[ClusterKernel] = []
        for node in (node for piece, _ in pieces for node in piece.graph.nodes if node.target in (norm, shrink)):
            a: Any = node.args[-1 if node.target == norm else 1]
            _, rows, columns = map(int, a.meta["val"].shape)
            if node.target == shrink:
                found.append(ShrinkKernel(columns, rows))
            else:
                b: Any = node.args[2]
                found.append(NormKernel(columns, rows, int(b.meta["val"].shape[2]), bool(node.args[7])))
        return tuple(dict.fromkeys(found))

    def from_json(self, data: Mapping[str, Any]) -> ClusterKernel:
        return _KINDS[data["source"]].from_json(data)

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.ops.lora_clusters.ops import load_cluster_kernels

        load_cluster_kernels([one for one in kernels if isinstance(one, ClusterKernel)], binaries, device)

    def faults(self, kernels: Sequence[CudaKernel], device: torch.device) -> Iterator[str]:
        """Runs each with so many tokens that clusters take several tiles, whose tokens have several slots."""
        for kernel in kernels:
            if isinstance(kernel, NormKernel | ShrinkKernel):
                error, count = _error(kernel, device)
                if not error <= _TOLERANCE:
                    yield (
                        f"the kernel of adapters {kernel.name} is off by {error:.2g} at {count} tokens (limit "
                        f"{_TOLERANCE:g}). Set {kernel.switch} to do without it, and report this."
                    )


def _error(kernel: NormKernel | ShrinkKernel, device: torch.device) -> tuple[float, int]:
    """Its distance from float32, and of how many tokens."""
    import torch

    from mllm_compile.runtime.ops import op

    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    def of_own(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        products = torch.stack([x.float() @ one.float().T for one in factors])[slots.clamp(0).long(), every]
        return products * (slots >= 0)[:, None]

    count = kernel.tokens_at_once * 3 // 2 + 5
    every = torch.arange(count, device=device)
    slots = (every // 3 % (_SLOTS + 1) - 1).int()
    x, a = random(count, kernel.columns), random(_SLOTS, kernel.a_rows, kernel.columns) / kernel.columns**0.5
    if isinstance(kernel, ShrinkKernel):
        pairs = [(op("lora_shrink_in_clusters")(x, a, slots, False)[0], of_own(x, a))]
    else:
        residual, weight, shrunk = random(count, kernel.columns), random(kernel.columns), random(1, count, kernel.rank)
        b = random(_SLOTS, kernel.columns, kernel.rank) / kernel.rank**0.5
        ours = op("lora_norm_in_clusters")(x, shrunk, b, slots, residual, weight, _EPS, kernel.plus_one, a)
        out = residual.float() + x.float() + of_own(shrunk[0], b)
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + _EPS) * (weight.float() + kernel.plus_one)
        pairs = list(zip(ours, (out, normed, of_own(normed, a)[None]), strict=True))
    errors = [((one.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(1e-3)).max() for one, exact in pairs]
    return torch.stack(errors).max().item(), count
