"""Runs the program's own kernels for decodes of one prefix on small batches, against attention in float32.

Shape legend: R requests, H query heads, D head dim.
"""

from __future__ import annotations

import torch

from mllm_compile.check.layers import one_layer_per_kernel
from mllm_compile.check.served import Served
from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.runtime.attention.split.cascade import SharedPrefix
from mllm_compile.runtime.attention.split.split_decode import DecodePiece
from mllm_compile.runtime.program.link import LinkedProgram

_COUNTS = (1, 9, 65)  # requests of a batch: a part of a tile of their query heads, and several tiles
_PAGES = (0, 1, 4)  # that all of a batch begin with
_OWN = 70  # tokens behind these, and more
# ‖ours − float32's‖ / ‖float32's‖ of the worst request; rounding alone is up to 5e-3 in bfloat16.
_TOLERANCE = 2e-2


def check_cascade_attention(linked: LinkedProgram, served: Served) -> None:
    """
    Raises:
        CompileError: a layer's kernels compute something else than torch's operations.
    """
    for layer, piece in one_layer_per_kernel(linked.program.layers, of_kind(linked.layer_kernels, "cascade")):
        for count in _COUNTS:
            for num_pages in _PAGES:
                error = _error(layer, piece, count, num_pages, served)
                if not error <= _TOLERANCE:
                    raise CompileError(
                        f"the attention of {count} decodes behind {num_pages * served.page_size} shared tokens in "
                        f"{layer.name} is off by {error:.2g} (limit {_TOLERANCE:g}): its kernels do not serve these "
                        "heads on this machine. Set runtime.cascade_attention: false, and report this."
                    )


def _error(layer: LayerSpec, piece: DecodePiece, count: int, shared_pages: int, served: Served) -> float:
    """‖ours − float32's‖ / ‖float32's‖ of the worst request of a batch whose pages are in no order."""
    generator = torch.Generator().manual_seed(0)
    page_size, dtype, device = served.page_size, served.dtype, served.device
    lengths = [shared_pages * page_size + 1 + (row * _OWN) % (3 * _OWN) for row in range(count)]
    width = -(-max(lengths) // page_size)
    pages = torch.randint(0, 4 * width, (count, width), generator=generator)  # a page may be of several requests
    pages[:, :shared_pages] = pages[0, :shared_pages].clone()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    cache_shape = 4 * width, page_size, layer.num_kv_heads, layer.head_dim
    keys, values, q = random(*cache_shape), random(*cache_shape), random(count, layer.num_heads, layer.head_dim)
    group = PlanGroup.of(layer)
    prefix = SharedPrefix([group], count, device)
    prefix.share(shared_pages * page_size)
    table, seq_lens = (torch.as_tensor(x, dtype=torch.int32, device=device) for x in (pages, lengths))
    ours = prefix.prepare(piece, group, table, seq_lens).run(q, (keys, values), torch.zeros_like(q)).float()
    errors = []
    for row, length in enumerate(lengths):
        places = torch.arange(length)
        slots = (pages[row][places // page_size] * page_size + places % page_size).to(device)
        heads = layer.num_heads // layer.num_kv_heads
        k, v = (cache.flatten(0, 1)[slots].float().repeat_interleave(heads, 1) for cache in (keys, values))
        weights = (torch.einsum("hd,lhd->hl", q[row].float(), k) * layer.sm_scale).softmax(-1)
        theirs = torch.einsum("hl,lhd->hd", weights, v)
        errors.append((ours[row] - theirs).norm() / theirs.norm())
    return torch.stack(errors).max().item()
