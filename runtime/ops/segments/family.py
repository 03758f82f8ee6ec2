"""The kernels of attention within segments, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops.segments.kernel import SegmentsKernel, segments_kernels

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces

_TOLERANCE = 2e-2  # ‖ours − theirs‖ / ‖theirs‖ of the worst row; rounding alone is up to 6e-3 in bfloat16
_HEADS, _KV_HEADS = 4, 2
# Several tiles of rows and of keys, whole ones, and segments that are shorter than any.
_LENGTHS = (700, 256, 64, 1)


class Family(KernelFamily):
    """The kernels of each head dim of towers' attention."""

    def wanted(self, pieces: CalledPieces) -> tuple[SegmentsKernel, ...]:
        from mllm_compile.runtime.ops import op

        attention = op("segment_attention_by_kernel")
        nodes: list[Any] = [node for piece, _ in pieces for node in piece.graph.nodes if node.target is attention]
        head_dims = dict.fromkeys(int(node.args[0].meta["val"].shape[2]) for node in nodes)
        return tuple(kernel for head_dim in head_dims for kernel in segments_kernels(head_dim))

    def from_json(self, data: Mapping[str, Any]) -> SegmentsKernel:
        return SegmentsKernel.from_json(data)

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.ops.segments.ops import load_segments_kernels

        load_segments_kernels([kernel for kernel in kernels if isinstance(kernel, SegmentsKernel)], binaries, device)

    def faults(self, kernels: Sequence[CudaKernel], device: torch.device) -> Iterator[str]:
        """Runs each on segments of several lengths, as the op chooses it among none but itself."""
        import torch

        from mllm_compile.runtime.ops.segments.ops import loaded_kernel

        generator = torch.Generator(device).manual_seed(0)
        ends = [0, *itertools.accumulate(_LENGTHS)]
        bounds = torch.tensor(ends, dtype=torch.int32, device=device)
        for kernel in kernels:
            if not isinstance(kernel, SegmentsKernel):
                continue
            q, k, v = (
                torch.randn(ends[-1], heads, kernel.head_dim, generator=generator, device=device, dtype=torch.bfloat16)
                for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
            )
            out, scale = torch.empty_like(q), kernel.head_dim**-0.5
            loaded_kernel(kernel, device)(q, k, v, bounds, out, scale, max(_LENGTHS))
            theirs = torch.cat([_attended(q[a:b], k[a:b], v[a:b], scale) for a, b in itertools.pairwise(ends)])
            off = (out.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
            error = off.max().item()
            if not error <= _TOLERANCE:
                yield (
                    f"attention within segments by {kernel.name} is off by {error:.2g} (limit {_TOLERANCE:g}). Set "
                    f"{kernel.switch} to do without it, and report this."
                )


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The attention [n, H, D] of one segment, in float32."""
    from torch.nn.functional import scaled_dot_product_attention

    group = q.shape[1] // k.shape[1]
    queries, keys, values = (x.float().transpose(0, 1) for x in (q, k, v))
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    return scaled_dot_product_attention(queries[None], keys[None], values[None], scale=scale)[0].transpose(0, 1)
