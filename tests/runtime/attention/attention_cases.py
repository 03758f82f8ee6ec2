"""Random batches over random page tables, and the attention they must get, computed the plainest way there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionBackend, AttentionInputs
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.forward_batch import Block, ForwardBatch, ForwardMode, MediaInputs
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool


def make_layer(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    window_left: int = -1,
    soft_cap: float = 0.0,
    sm_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    layer_id: int = 0,
    alibi_slopes: tuple[float, ...] = (),
    chunk: int = 0,
) -> AttentionLayer:
    return AttentionLayer(
        name=f"layer{layer_id}",
        layer_id=layer_id,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim or head_dim,
        sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
        logits_soft_cap=soft_cap,
        window_left=window_left,
        sinks=None if sinks is None else "sinks",
        alibi_slopes=alibi_slopes,
        chunk=chunk,
        sink_logits=sinks,
    )


@dataclass
class AttentionCase:
    """A batch whose prefix keys and values are in the pages already, its q, k, v and the expected output."""

    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    expected: torch.Tensor  # [T, H, Dv] float32


def make_case(
    layer: AttentionLayer,
    prefix_lens: Sequence[int],
    new_lens: Sequence[int],
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,
    blocks: Sequence[tuple[int, int, int]] = (),
    in_a_row: bool = False,
) -> AttentionCase:
    """Requests with `prefix_lens[i]` cached and `new_lens[i]` new tokens, in pages in random order, or in a row.

    The mode follows from the lengths: DECODE if all new lengths are 1, MIXED if the first is, else EXTEND. With a
    kv_dtype other than dtype the expected output is computed from keys and values rounded to it. Each of `blocks` is a
    request, and the first position and the end of tokens that see each other in both directions; they end among its new
    tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    seq_lens = [p + n for p, n in zip(prefix_lens, new_lens, strict=True)]
    pages_of = [-(-length // page_size) for length in seq_lens]
    max_context_len = max(pages_of) * page_size
    table = ReqToTokenPool(len(seq_lens), max_context_len, device)
    pool_spec = [layer.cache_shape]
    kv_dtype = kv_dtype or dtype
    kv_pool = KVPool(sum(pages_of) + 1, page_size, pool_spec, kv_dtype, device)
    page_ids = 1 + (torch.arange(sum(pages_of)) if in_a_row else torch.randperm(sum(pages_of), generator=generator))
    # The content of pages that are not read must not matter.
    for buffer in kv_pool.get_pages(0):
        buffer.fill_(min(1e4, torch.finfo(kv_dtype).max))

    rows = list(range(1, len(seq_lens) + 1))
    table.write_pages(
        torch.tensor(np.repeat(rows, pages_of), device=device),
        torch.tensor(np.concatenate([np.arange(n) for n in pages_of]), device=device),
        page_ids.to(device),
        page_size,
    )
    all_k = [random(n, layer.num_kv_heads, layer.head_dim) for n in seq_lens]
    all_v = [random(n, layer.num_kv_heads, layer.v_head_dim) for n in seq_lens]
    if layer.is_latent:
        all_v = [k[..., : layer.v_head_dim] for k in all_k]
    queries = [random(n, layer.num_heads, layer.query_dim) for n in new_lens]
    new_slots = []
    for row, prefix, length, k, v in zip(rows, prefix_lens, seq_lens, all_k, all_v, strict=True):
        slots = table.req_to_token[row, :length].long()
        kv_pool.set_kv_buffer(0, slots[:prefix], k[:prefix], v[:prefix])
        new_slots.append(slots[prefix:])

    batch = make_batch(rows, prefix_lens, new_lens, torch.cat(new_slots), table, kv_pool, device)
    ends = np.cumsum(new_lens)
    if blocks:
        of_batch = [
            Block(
                request,
                max(first, prefix_lens[request]) + (at := int(ends[request]) - seq_lens[request]),
                end + at,
                end,
            )
            for request, first, end in blocks
        ]
        batch.media = MediaInputs(torch.empty(0), torch.empty(0), tuple(of_batch))
    expected = [
        naive_attention(
            q, *_seen(k.to(kv_dtype), v.to(kv_dtype), layer), [block[1:] for block in blocks if block[0] == request]
        )
        for request, (q, k, v) in enumerate(zip(queries, all_k, all_v, strict=True))
    ]
    return AttentionCase(
        batch=batch,
        q=torch.cat(queries),
        k=torch.cat([k[p:] for k, p in zip(all_k, prefix_lens, strict=True)]),
        v=torch.cat([v[p:] for v, p in zip(all_v, prefix_lens, strict=True)]),
        expected=torch.cat(expected),
    )


def latent_layer(num_heads: int, rotated: int, rank: int, key: int, value: int) -> AttentionLayer:
    """A layer over latents with its up-projection."""
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(num_heads * (key + value), rank, generator=generator) * rank**-0.5
    layer = make_layer(num_heads, 1, rank + rotated, rank, sm_scale=(key + rotated) ** -0.5)
    own = {"up_projection": "up", "up_key_dim": key, "up_value_dim": value}
    return replace(layer, is_latent=True, **own, up_weight=up)


def _seen(k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor, AttentionLayer]:
    """The keys and values of every head that latents stand for, and the layer that they are of; others as they are."""
    if layer.up_weight is None:
        return k, v, layer
    rank, of_heads = layer.v_head_dim, layer.up_weight.double().view(layer.num_heads, -1, layer.v_head_dim)
    keys, values = torch.einsum("td,hnd->thn", k[:, 0, :rank].double(), of_heads).split(
        [layer.up_key_dim, layer.up_value_dim], -1
    )
    keys = torch.cat((keys, k[..., rank:].double().expand(-1, layer.num_heads, -1)), -1)
    plain = make_layer(layer.num_heads, layer.num_heads, layer.query_dim, layer.out_dim, sm_scale=layer.sm_scale)
    return keys, values, plain


def attend(
    backend: AttentionBackend,
    layer: AttentionLayer,
    batch: ForwardBatch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes k and v into the cache and attends; the batch has been planned."""
    batch.token_to_kv_pool.set_kv_buffer(layer.layer_id, batch.out_cache_loc, k, v)
    out = q.new_empty(*q.shape[:2], layer.out_dim) if out is None else out
    backend.forward(AttentionInputs(q, k, v, out, layer, batch))
    return out


def make_batch(
    rows: Sequence[int],
    prefix_lens: Sequence[int],
    new_lens: Sequence[int],
    out_cache_loc: torch.Tensor,
    table: ReqToTokenPool,
    kv_pool: KVPool,
    device: str,
) -> ForwardBatch:
    """A ForwardBatch by hand; its ids are zeros, which attention does not look at."""
    if all(n == 1 for n in new_lens):
        mode = ForwardMode.DECODE
    else:
        mode = ForwardMode.MIXED if new_lens[0] == 1 else ForwardMode.EXTEND
    prefix, new = np.array(prefix_lens, np.int32), np.array(new_lens, np.int32)
    num_tokens = int(new.sum())
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(prefix_lens, new_lens, strict=True)])
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=len(rows),
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        req_pool_indices=torch.tensor(rows, dtype=torch.int64, device=device),
        seq_lens=torch.from_numpy(prefix + new).to(device),
        seq_lens_cpu=torch.from_numpy(prefix + new),
        out_cache_loc=out_cache_loc,
        positions=torch.from_numpy(positions).to(device),
        req_to_token_pool=table,
        token_to_kv_pool=kv_pool,
        attn_backend=TorchAttnBackend(),
    )
    if mode.is_extend():
        batch.extend_seq_lens_cpu = torch.from_numpy(new)
        batch.extend_prefix_lens_cpu = torch.from_numpy(prefix)
        batch.extend_seq_lens = batch.extend_seq_lens_cpu.to(device)
        batch.extend_prefix_lens = batch.extend_prefix_lens_cpu.to(device)
    return batch


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: AttentionLayer,
    blocks: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """One request, one query and one head at a time, in float64: q are the last positions of k, v."""
    q, k, v = q.double(), k.double(), v.double()
    group = layer.num_heads // layer.num_kv_heads
    first = k.shape[0] - q.shape[0]
    out = torch.zeros(q.shape[0], layer.num_heads, layer.v_head_dim, dtype=torch.float64, device=q.device)
    for i in range(q.shape[0]):
        position = first + i
        last = next((end for begin, end in blocks if begin <= position < end), position + 1)
        window = layer.params.window_left
        start = max(0, position - window) if window >= 0 else 0
        if layer.chunk:
            start = max(start, position // layer.chunk * layer.chunk)
        for head in range(layer.num_heads):
            keys, values = (x[start:last, head // group] for x in (k, v))
            logits = keys @ q[i, head] * layer.params.sm_scale
            if layer.params.logits_soft_cap:
                logits = layer.params.logits_soft_cap * torch.tanh(logits / layer.params.logits_soft_cap)
            if layer.alibi_slopes:
                logits = logits + layer.alibi_slopes[head] * (torch.arange(start, position + 1) - position)
            exps = torch.exp(logits)
            total = exps.sum()
            if layer.sink_logits is not None:
                total = total + torch.exp(layer.sink_logits[head].double())
            out[i, head] = (exps / total) @ values
    return out.float()
