"""Runs the library of paged attention on a small batch, through the backend that serves, against torch's in float32.

The self-check's batches pass it over: it has attention of its own.

Shape legend: R requests, T new tokens, H query heads, D head dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mllm_compile.check.served import Served
from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.base import AttentionBackend, AttentionInputs
from mllm_compile.runtime.attention.layer import AttentionLayer, LayerSpec
from mllm_compile.runtime.attention.paged.attend import PagedAttention
from mllm_compile.runtime.attention.paged.library import PAGED_ATTENTION
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool
from mllm_compile.runtime.program.link import LinkedProgram

# All tokens and new tokens of each request: decodes of one part and of several; prompts of one block of queries and of
# several, with and without a prefix.
_LENGTHS = (70, 600, 1, 9, 150)
_NEW = (1, 1, 1, 9, 60)
# ‖ours − float32's‖ / ‖float32's‖ of the worst token; rounding alone is up to 3e-3 in bfloat16.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def check_paged_attention(linked: LinkedProgram, served: Served) -> None:
    """
    Raises:
        CompileError: the library attends otherwise than torch's operations, or writes other keys and values.
    """
    checked: set[LayerSpec] = set()
    for layer in linked.program.layers:
        library = linked.layer_kernels[layer.name].paged if layer.name in linked.layer_kernels else None
        alike = replace(layer, name="", layer_id=0, sinks=layer.sinks and "sinks")
        if library is None or alike in checked:
            continue
        checked.add(alike)
        error = _error(alike, library, served)
        if not error <= _TOLERANCE[served.dtype]:
            raise CompileError(
                f"the attention of {layer.name} is off by {error:.2g} in a batch of {len(_LENGTHS)} requests (limit "
                f"{_TOLERANCE[served.dtype]:g}): its C++ does not serve these heads on this machine. Set "
                f"{PAGED_ATTENTION.switch} to do without it, and report this."
            )


def _error(layer: LayerSpec, library: PagedAttention, served: Served) -> float:
    """‖ours − torch's‖ / ‖torch's‖ of the worst token of a batch whose pages are in no order."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(served.dtype)

    bound = AttentionLayer.of(layer, {"sinks": random(layer.num_heads)})
    width = -(-max(_LENGTHS) // served.page_size)
    num_pages = len(_LENGTHS) * width + 1
    table = ReqToTokenPool(len(_LENGTHS), width * served.page_size, "cpu")
    rows = torch.arange(1, len(_LENGTHS) + 1)
    pages = torch.randperm(num_pages - 1, generator=generator) + 1
    places = torch.arange(width).repeat(len(_LENGTHS))
    table.write_pages(rows.repeat_interleave(width), places, pages, served.page_size)
    slots = torch.cat(
        [
            table.req_to_token[row, length - new : length]
            for row, length, new in zip(rows.tolist(), _LENGTHS, _NEW, strict=True)
        ]
    ).long()
    q = random(sum(_NEW), layer.num_heads, layer.head_dim)
    heads, dim, value_dim = layer.num_kv_heads, layer.head_dim, layer.v_head_dim
    k, v = random(sum(_NEW), heads, dim), random(sum(_NEW), heads, value_dim)
    cached = [random(num_pages * served.page_size, heads, width) for width in (dim, layer.cache_shape[2])]

    def attended(backend: AttentionBackend, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        pool = KVPool(num_pages, served.page_size, [layer.cache_shape], dtype, "cpu")
        for buffer, numbers in zip(pool.get_kv_buffer(0), cached, strict=True):
            buffer.copy_(numbers)
        batch = _batch(rows, slots, table, pool, backend)
        backend.init_forward_metadata(batch)
        queries, keys, values = (one.to(dtype) for one in (q, k, v))
        left = slots if backend.writes_kv(bound) else None
        if left is None:
            pool.set_kv_buffer(0, slots, keys, values)
        out = torch.empty(*q.shape[:2], layer.v_head_dim, dtype=dtype)
        backend.forward(AttentionInputs(queries, keys, values, out, bound, batch, left))
        return out.float().flatten(1), *(buffer.float() for buffer in pool.get_kv_buffer(0))

    ours, *kept = attended(TorchAttnBackend(paged={bound.name: library.of(bound, served.dtype)}), served.dtype)
    theirs, *right = attended(TorchAttnBackend(), torch.float32)
    if not all(map(torch.equal, kept, right)):
        return float("inf")
    difference: float = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max().item()
    return difference


def _batch(
    rows: torch.Tensor, slots: torch.Tensor, table: ReqToTokenPool, pool: KVPool, backend: AttentionBackend
) -> ForwardBatch:
    """The requests of `rows` as a step has them; attention looks at no ids and no positions."""
    nothing = torch.zeros(sum(_NEW), dtype=torch.int64)
    seq_lens, new_lens = (torch.tensor(counts, dtype=torch.int32) for counts in (_LENGTHS, _NEW))
    return ForwardBatch(
        forward_mode=ForwardMode.MIXED,
        batch_size=len(_LENGTHS),
        input_ids=nothing,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        out_cache_loc=slots,
        positions=nothing,
        seq_lens_cpu=seq_lens,
        req_to_token_pool=table,
        token_to_kv_pool=pool,
        attn_backend=backend,
        extend_seq_lens_cpu=new_lens,
    )
