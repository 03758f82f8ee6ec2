"""Runs the kernels over latents on small batches, through the backend that serves, against torch's in float32.

The self-check's batches pass them over: it has attention of its own.

Shape legend: R requests, T new tokens, P pages.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mllm_compile.check.layers import one_layer_per_kernel
from mllm_compile.check.served import Served
from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.base import AttentionBackend, AttentionInputs
from mllm_compile.runtime.attention.latent.backend import LatentAttnBackend
from mllm_compile.runtime.attention.latent.choice import ExpansionChoice, Widths, all_of_them, none_of_them
from mllm_compile.runtime.attention.layer import AttentionLayer, LayerSpec
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool
from mllm_compile.runtime.program.link import LinkedProgram

# All tokens and new tokens of each request. Batches are one decode; several; prompts with and without a prefix after a
# decode; and one after so many tokens that blocks share its keys.
_BATCHES = (
    ((2100,), (1,)),
    ((2100, 300, 70, 1), (1, 1, 1, 1)),
    ((300, 2100, 70, 129), (1, 9, 70, 128)),
    ((2500,), (5,)),
)
# Keys of each part of prompts over keys and values made of latents: the longest of these prompts take several.
_EXPANDED_TOKENS = 2100
# ‖ours − float32's‖ / ‖float32's‖ of the worst token; rounding alone is up to 3e-3 in bfloat16.
_TOLERANCE = 2e-2
# What prompts attend over: latents, or expanded keys.
_NAMES = {none_of_them: ("", "absorb_latents"), all_of_them: (" over keys and values", "expand_latents")}


def check_latent_attention(linked: LinkedProgram, served: Served) -> None:
    """
    Raises:
        CompileError: a layer's kernels compute something else than torch's operations.
    """
    for layer, kernels in one_layer_per_kernel(linked.program.layers, of_kind(linked.layer_kernels, "latent")):
        for lengths, new in _BATCHES:
            for choice in (none_of_them,) if kernels.expanded is None or max(new) == 1 else (none_of_them, all_of_them):
                error = _error(layer, linked, lengths, new, choice, served)
                if not error <= _TOLERANCE:
                    how, switch = _NAMES[choice]
                    raise CompileError(
                        f"the attention over latents of {layer.name} is off by {error:.2g} in a batch of "
                        f"{len(lengths)} requests with {sum(new)} new tokens{how} (limit {_TOLERANCE:g}): its kernels "
                        f"do not serve these heads on this machine. Set compile.disable_passes: [{switch}] to do "
                        "without them, and report this."
                    )


def _error(
    layer: LayerSpec,
    linked: LinkedProgram,
    lengths: tuple[int, ...],
    new: tuple[int, ...],
    choice: ExpansionChoice,
    served: Served,
) -> float:
    """‖ours − torch's‖ / ‖torch's‖ of the worst token of a batch whose pages are in no order, and whose prompts attend
    as `choice` says; torch's attend over latents."""
    generator = torch.Generator().manual_seed(0)
    page_size, dtype, device = served.page_size, served.dtype, served.device
    widths = Widths.of(layer)
    up = torch.randn(widths.num_heads * (widths.key + widths.value), widths.rank, generator=generator)
    up = (up * widths.rank**-0.5).to(dtype).to(device)
    alone, in_float32 = (
        AttentionLayer.of(replace(layer, layer_id=0), {layer.up_projection or "": weight})
        for weight in (up, up.float())
    )
    width = -(-max(lengths) // page_size)
    num_requests, num_pages = len(lengths), len(lengths) * width
    table = ReqToTokenPool(num_requests, width * page_size, device)
    pages = torch.randperm(num_pages, generator=generator).to(device) + 1
    rows = torch.arange(1, num_requests + 1, device=device)
    places = torch.arange(width, device=device).repeat(num_requests)
    table.write_pages(rows.repeat_interleave(width), places, pages, page_size)
    q = torch.randn(sum(new), layer.num_heads, layer.query_dim, generator=generator).to(dtype).to(device)
    latents = torch.randn((num_pages + 1) * page_size, 1, layer.head_dim, generator=generator).to(dtype).to(device)

    def attended(backend: AttentionBackend, layer: AttentionLayer, in_type: torch.dtype) -> torch.Tensor:
        pool = KVPool(num_pages + 1, page_size, [layer.cache_shape], in_type, device)
        pool.get_kv_buffer(0)[0].copy_(latents)
        batch = _batch(lengths, new, rows, table, pool, backend)
        backend.init_forward_metadata(batch)
        out = torch.empty(*q.shape[:2], layer.out_dim, dtype=in_type, device=device)
        backend.forward(AttentionInputs(q.to(in_type), latents[:0], latents[:0], out, layer, batch))
        return out.float().flatten(1)

    serving = LatentAttnBackend(
        [alone],
        of_kind(linked.layer_kernels, "latent"),
        req_to_token=table.req_to_token,
        max_requests=num_requests,
        page_size=page_size,
        dtype=dtype,
        choice=choice,
        most_expanded_bytes=_EXPANDED_TOKENS * widths.numbers_of_a_token * dtype.itemsize,
    )
    theirs = attended(TorchAttnBackend(choice=none_of_them), in_float32, torch.float32)
    ours = attended(serving, alone, dtype)
    difference: float = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max().item()
    return difference


def _batch(
    lengths: tuple[int, ...],
    new: tuple[int, ...],
    rows: torch.Tensor,
    table: ReqToTokenPool,
    pool: KVPool,
    backend: AttentionBackend,
) -> ForwardBatch:
    """The requests of `rows` as a step has them; attention looks at no ids and no positions."""
    device = rows.device
    nothing = torch.zeros(sum(new), dtype=torch.int64, device=device)
    seq_lens, new_lens = (torch.tensor(counts, dtype=torch.int32) for counts in (lengths, new))
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if max(new) == 1 else ForwardMode.MIXED,
        batch_size=len(lengths),
        input_ids=nothing,
        req_pool_indices=rows,
        seq_lens=seq_lens.to(device),
        out_cache_loc=nothing,
        positions=nothing,
        seq_lens_cpu=seq_lens,
        req_to_token_pool=table,
        token_to_kv_pool=pool,
        attn_backend=backend,
        extend_seq_lens_cpu=new_lens,
    )
