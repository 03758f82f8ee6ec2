"""Runs the program's own kernels for prompts on a small batch, against the meaning of attention in float32.

The self-check's batches pass them over: it has attention of its own.

Shape legend: R requests, T new tokens, H query heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mllm_compile.check.layers import one_layer_per_kernel
from mllm_compile.check.served import Served
from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.flashinfer.plan import PagedView
from mllm_compile.runtime.attention.flashinfer.prefill import GroupPiecePrefill, PrefillRows
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.runtime.attention.split.split_decode import DecodePiece, LinkedDecodes, SplitDecodeSpace
from mllm_compile.runtime.ops.trace import attention_reference
from mllm_compile.runtime.program.link import LinkedProgram

# All tokens and new tokens of each request: behind a decode, with and without a prefix, of several tiles.
_LENGTHS = (300, 1, 70, 600, 129)
_NEW = (1, 1, 70, 300, 2)
_NUM_DECODES = 1
# ‖ours − float32's‖ / ‖float32's‖ of the worst token; rounding alone is up to 3e-3 in bfloat16.
_TOLERANCE = 2e-2
_REACH = 128  # of a bias by distance, as T5 has it


def check_prefill_attention(linked: LinkedProgram, served: Served) -> None:
    """
    Raises:
        CompileError: a layer's kernel computes something else than torch's operations.
    """
    for layer, prefill in one_layer_per_kernel(linked.program.layers, of_kind(linked.layer_kernels, "prefill")):
        error = _error(layer, prefill, linked.layer_kernels[layer.name].decode, served)
        if not error <= _TOLERANCE:
            raise CompileError(
                f"the attention of prompts in {layer.name} is off by {error:.2g} in a batch of {len(_LENGTHS)} "
                f"requests (limit {_TOLERANCE:g}): its kernel does not serve these heads on this machine. Set "
                "runtime.attention_backend: torch, and report this."
            )


def _error(layer: LayerSpec, piece: DecodePiece, decoders: LinkedDecodes, served: Served) -> float:
    """‖ours − float32's‖ / ‖float32's‖ of the worst token of the prompts of a batch whose pages are in no order."""
    generator = torch.Generator().manual_seed(0)
    page_size, dtype, device = served.page_size, served.dtype, served.device
    width = -(-max(_LENGTHS) // page_size)
    pages = torch.randperm(len(_LENGTHS) * width, generator=generator).view(-1, width)
    slots = (pages[:, :, None] * page_size + torch.arange(page_size)).flatten(1).to(device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    cache_shape = pages.numel(), page_size, layer.num_kv_heads, layer.head_dim
    keys, values, q = random(*cache_shape), random(*cache_shape), random(sum(_NEW), layer.num_heads, layer.head_dim)
    group = PlanGroup.of(layer)
    space = SplitDecodeSpace([(group, decoders)], slots.int(), len(_LENGTHS), page_size, dtype)
    space.list_pages(torch.arange(len(_LENGTHS), device=device))
    starts = np.cumsum((0, *_NEW), dtype=np.int32)[_NUM_DECODES:]
    rows = PrefillRows(
        torch.from_numpy(starts - starts[0]),
        np.diff(starts),
        np.subtract(_LENGTHS, _NEW)[_NUM_DECODES:],
        use_ragged=False,
        pages_of=_no_pages,
        seq_lens=torch.tensor(_LENGTHS, dtype=torch.int32, device=device),
        first_tokens=starts,
    )
    out = torch.zeros_like(q)
    prefill = GroupPiecePrefill(piece, group, space, dtype)
    bias = random(layer.num_heads, 2 * _REACH + 1) if layer.has_distance_bias else None
    prefill.plan(rows).run(q, (keys, values), out, bias)
    errors = []
    for row in range(_NUM_DECODES, len(_LENGTHS)):
        length, new, start = _LENGTHS[row], _NEW[row], int(starts[row - _NUM_DECODES])
        own = slots[row, :length]
        own_keys, own_values = (cache.flatten(0, 1)[own].float() for cache in (keys, values))
        whole = torch.cat((q.new_zeros(length - new, *q.shape[1:]), q[start : start + new])).float()
        rules = layer.sm_scale, layer.logits_soft_cap, layer.window_left
        options: dict[str, Any] = {"alibi_slopes": layer.slopes_of(0), "chunk": layer.chunk, "bias": bias}
        theirs = attention_reference(whole, own_keys, own_values, None, *rules, **options)[length - new :].flatten(1)
        ours = out[start : start + new].float().flatten(1)
        errors.append(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())
    return torch.stack(errors).max().item()


def _no_pages(window_left: int) -> PagedView:
    raise RuntimeError("the kernel reads a page table, not a list of pages")
