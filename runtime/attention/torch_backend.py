"""Attention in plain torch over the paged cache: the CPU's backend, and on CUDA the reference for the others.

On a CPU the compiled library attends (paged/), where the runtime holds it and it serves a layer. Torch does the others.
Decodes of a batch run together, padded to the longest. Prefills run one request after another, in blocks of queries, so
that no score matrix grows with the square of a prompt. PromptSizes over latents may get keys and values made of these
first (latent/expanded.py). Slow beside a real kernel, right everywhere.

Shape legend: R requests, T new tokens of one request, L keys that are looked at, H query heads, Hk kv heads,
G = H / Hk, D head dim, Dv value head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from mllm_compile.runtime.attention.base import AttentionBackend, AttentionInputs
from mllm_compile.runtime.attention.capture import Cascades
from mllm_compile.runtime.attention.distances import of_distances
from mllm_compile.runtime.attention.index import Index, chosen_keys
from mllm_compile.runtime.attention.latent.choice import ExpansionChoice, Widths, fewer_products
from mllm_compile.runtime.attention.latent.expanded import ExpandedPrompts, attend_in_torch, new_room
from mllm_compile.runtime.attention.latent.expansion import MOST_EXPANDED_BYTES
from mllm_compile.runtime.attention.latent.products import absorb, apply_to_sums
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from mllm_compile.runtime.attention.paged.attend import PagedBatch, PagedLayer
from mllm_compile.runtime.forward_batch import ForwardBatch

# Bounds on what is gathered or scored at once: 64 Ki keys of 8 heads of 128 floats are 256 MiB, for K and for V.
MAX_GATHERED_KEYS = 1 << 16
QUERY_BLOCK = 512
FEWEST_SHARED_KEYS = 256  # that decodes are spared, for a product of their own to pay


@dataclass
class _Plan:
    """One batch: host numbers, and the page table rows of its decodes by how far back they look."""

    num_decodes: int
    common_prefix_len: int  # of the decodes
    query_start: list[int]  # [R + 1]
    seq_lens: list[int]  # [R]
    # (shared tokens, window_left, chunk, Hk) → what _decode_view returns
    decode_views: dict[tuple[int, int, int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    expanded: dict[Widths, ExpandedPrompts] = field(default_factory=dict)  # of layers with their up-projection
    paged: dict[bool, PagedBatch] = field(default_factory=dict)  # by whether layers have a window


class TorchAttnBackend(AttentionBackend, Cascades):
    """Attends in plain torch. Stateless except for the plan of the current batch.

    Args:
        deterministic: compute each request by itself: padding a batch's decodes to the longest of them changes the
            shapes of the products, and with them the last bits of the others.
        choice, most_expanded_bytes: as LatentAttnBackend has them.
        paged: layer → the library's attention, of those that it serves.
    """

    rope = decodes = captured_cascades = verifies = mixed = prompts = None
    mixed_obstacle = "attention in plain torch waits for the host"
    query_blocks = 0.0

    def __init__(
        self,
        deterministic: bool = False,
        choice: ExpansionChoice = fewer_products,
        most_expanded_bytes: int = MOST_EXPANDED_BYTES,
        paged: Mapping[str, PagedLayer] | None = None,
    ) -> None:
        self._deterministic = deterministic
        self._paged = paged or {}
        self._choice = choice
        self._most_expanded_bytes = most_expanded_bytes
        self._plan: _Plan | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        common = CommonAttentionMetadata.of(batch)
        num_decodes = 0 if self._deterministic else split_decodes_and_prefills(common)[0]
        shared = batch.common_prefix_len if num_decodes else 0
        self._plan = _Plan(num_decodes, shared, common.query_start_loc_cpu.tolist(), common.seq_lens_cpu.tolist())

    def reads_pages(self, batch: ForwardBatch) -> bool:
        return True

    def writes_kv(self, layer: AttentionLayer) -> bool:
        return layer.name in self._paged

    @property
    def cascades(self) -> Cascades:
        return self

    def cascade_pays(self, num_requests: int, num_tokens: int, is_captured: bool = False) -> bool:
        return (num_requests - 1) * num_tokens >= FEWEST_SHARED_KEYS

    def forward_extend(self, inputs: AttentionInputs) -> None:
        plan, layer = self._plan, inputs.layer
        if plan is None:
            raise RuntimeError("call init_forward_metadata with the batch before forward")
        paged = self._paged.get(layer.name)
        if paged is not None:
            paged.run(inputs, _paged_batch(plan, inputs), _num_shared(plan, layer))
            return
        if layer.up_projection is None:
            _attend_for(plan, range(plan.num_decodes, len(plan.seq_lens)), inputs)
            return
        prompts = self._expanded(plan, inputs)
        if count := prompts.num_other_rows:
            queries = inputs.q.new_empty(count, layer.num_heads, layer.head_dim)
            sums = inputs.q.new_empty(count, layer.num_heads, layer.v_head_dim)
            absorb(inputs.q[:count], layer, queries)
            over_latents = AttentionInputs(queries, inputs.k, inputs.v, sums, layer, inputs.batch)
            _attend_for(plan, prompts.others.tolist(), over_latents)
            apply_to_sums(sums, layer, inputs.out[:count])
        latents, _ = inputs.batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        attend = partial(attend_in_torch, sm_scale=layer.params.sm_scale)
        prompts.run(inputs.q, latents, layer, inputs.out, attend, partial(new_room, Widths.of(layer), inputs.q))

    forward_decode = forward_extend

    def _expanded(self, plan: _Plan, inputs: AttentionInputs) -> ExpandedPrompts:
        widths, common = Widths.of(inputs.layer), CommonAttentionMetadata.of(inputs.batch)
        if widths not in plan.expanded:
            most_tokens = max(1, self._most_expanded_bytes // (widths.numbers_of_a_token * inputs.q.dtype.itemsize))
            most = most_tokens, common.num_actual_tokens
            plan.expanded[widths] = ExpandedPrompts.plan(common, plan.num_decodes, widths, self._choice, *most)
        return plan.expanded[widths]


def _attend_for(plan: _Plan, prompts: Iterable[int], inputs: AttentionInputs) -> None:
    """Attends for the batch's decodes and for these requests behind them."""
    layer, batch = inputs.layer, inputs.batch
    if plan.num_decodes:
        count = plan.num_decodes
        _decode(plan, inputs.q[:count], layer, batch, inputs.out[:count], inputs.bias, _part_of(inputs.index, 0, count))
    for i in prompts:
        for part in _parts(plan, layer, batch, i):
            rows = slice(part.start, part.end)
            index = _part_of(inputs.index, part.start, part.end)
            _prefill(inputs.q[rows], layer, batch, part, inputs.out[rows], inputs.bias, index)


class _Part(NamedTuple):
    """Queries of one request, as Block; `is_block` says whether they see each other in both directions."""

    request: int
    start: int
    end: int
    seq_len: int
    is_block: bool


def _parts(plan: _Plan, layer: AttentionLayer, batch: ForwardBatch, request: int) -> Iterator[_Part]:
    """A request's queries: its blocks, and what is between."""
    at, end, seq_len = plan.query_start[request], plan.query_start[request + 1], plan.seq_lens[request]
    for block in batch.media.blocks_of(layer.params.window_left) if batch.media is not None else ():
        if block.request != request:
            continue
        if at < block.start:
            yield _Part(request, at, block.start, seq_len - (end - block.start), is_block=False)
        yield _Part(*block, is_block=True)
        at = block.end
    if at < end:
        yield _Part(request, at, end, seq_len, is_block=False)


def _paged_batch(plan: _Plan, inputs: AttentionInputs) -> PagedBatch:
    """The batch as the library reads it; made once for all layers without a window, and for all with one."""
    layer, batch = inputs.layer, inputs.batch
    has_window = layer.params.window_left >= 0
    if has_window not in plan.paged:
        rows, count = batch.req_pool_indices.numpy(), plan.num_decodes
        starts, lens = np.array(plan.query_start), np.array(plan.seq_lens)
        requests = np.stack((rows, starts[:-1], starts[1:] - starts[:-1], lens, np.zeros_like(lens)), axis=1)
        if batch.media is not None:
            prompts = (part for i in range(count, len(lens)) for part in _parts(plan, layer, batch, i))
            parts = [(rows[p.request], p.start, p.end - p.start, p.seq_len, p.is_block) for p in prompts]
            requests = np.array([*requests[:count], *parts])
        table = CommonAttentionMetadata.of(batch).block_table
        plan.paged[has_window] = PagedBatch.of(requests, table, count)
    return plan.paged[has_window]


def _num_shared(plan: _Plan, layer: AttentionLayer) -> int:
    """The first tokens that this layer reads once for all decodes."""
    sees_all = layer.params.window_left < 0 and not layer.follows_places
    return plan.common_prefix_len if sees_all else 0


def _decode_view(
    plan: _Plan, layer: AttentionLayer, batch: ForwardBatch, num_shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [R, Hk, L] of the KV buffers seen as [slots * Hk, D], visible [R, L]) for the last L positions of each
    decode behind the shared ones; made once per batch, window, chunk and Hk."""
    num_kv_heads, window_left, chunk = layer.num_kv_heads, layer.params.window_left, layer.chunk
    key = (num_shared, window_left, chunk, num_kv_heads)
    if key not in plan.decode_views:
        num_keys = max(plan.seq_lens[: plan.num_decodes]) - num_shared
        if window_left >= 0:
            num_keys = min(num_keys, window_left + 1)
        if chunk:
            num_keys = min(num_keys, chunk)
        requests = batch.req_pool_indices[: plan.num_decodes, None]
        seq_lens = batch.seq_lens[: plan.num_decodes, None].long()
        positions = torch.arange(num_keys, device=requests.device) + (seq_lens - num_keys).clamp(min=num_shared)
        visible = positions < seq_lens
        if chunk:
            visible &= positions >= (seq_lens - 1) // chunk * chunk
        # A position past the end may be beyond the table; what is read in its place is masked out.
        slots = CommonAttentionMetadata.of(batch).block_table[requests, torch.where(visible, positions, 0)].long()
        heads = torch.arange(num_kv_heads, device=requests.device)[:, None]
        plan.decode_views[key] = (slots[:, None, :] * num_kv_heads + heads, visible)
    return plan.decode_views[key]


def _decode(
    plan: _Plan,
    q: torch.Tensor,
    layer: AttentionLayer,
    batch: ForwardBatch,
    out: torch.Tensor,
    table: torch.Tensor | None,
    index: Index | None,
) -> None:
    """q [R, H, D] → out [R, H, Dv]: the last position of each request."""
    num_shared = _num_shared(plan, layer)
    rows, visible = _decode_view(plan, layer, batch, num_shared)
    shared = _shared_keys(batch, layer, num_shared) if num_shared else None
    k_rows, v_rows = (buffer.flatten(0, 1) for buffer in batch.token_to_kv_pool.get_kv_buffer(layer.layer_id))
    step = max(1, MAX_GATHERED_KEYS // rows.shape[2])
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        # Gathered head by head, so that the products below find each head's keys side by side: 5 times as fast.
        keys = _take(k_rows, rows[part].flatten()).view(*rows[part].shape, -1)  # [R, Hk, L, D]
        if layer.is_latent:
            values = keys[..., : layer.v_head_dim]
        else:
            values = _take(v_rows, rows[part].flatten()).view(*rows[part].shape, -1)
        grouped = q[part].unflatten(1, (layer.num_kv_heads, -1))  # [R, Hk, G, D]: G queries at one position
        seen = visible[part, None]
        if index is not None:
            of_part = tuple(one[part] for one in index)
            seen = chosen_keys(of_part, keys[:, 0, :, -layer.index_dim :], visible[part], layer.choice)
            seen = seen.repeat_interleave(layer.num_kv_heads // seen.shape[1], 1)
            keys = keys[..., : -layer.index_dim]
        mask = seen[:, :, None]  # [R, 1 or Hk, 1, L]
        bias = None
        if layer.alibi_slopes or table is not None:
            places = torch.arange(rows.shape[2], device=q.device)
            places = places - (visible[part] * places).amax(dim=-1, keepdim=True)  # [R, L], from the query's own on
            if table is None:
                bias = _slopes(layer, q).view(layer.num_kv_heads, -1, 1) * places[:, None, None]  # [R, Hk, G, L]
            else:
                bias = of_distances(table, places).unflatten(0, (layer.num_kv_heads, -1)).permute(2, 0, 1, 3)
        sinks = _grouped_sinks(layer)
        out[part] = _attend(grouped, keys, values, mask, layer, sinks, bias, shared).flatten(1, 2)


def _shared_keys(batch: ForwardBatch, layer: AttentionLayer, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [Hk, P, D] and values [Hk, P, Dv] of the first `count` tokens of all decodes."""
    slots = CommonAttentionMetadata.of(batch).block_table[batch.req_pool_indices[0], :count].long()
    k_buf, v_buf = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    keys = _take(k_buf, slots).transpose(0, 1)
    values = keys[..., : layer.v_head_dim] if layer.is_latent else _take(v_buf, slots).transpose(0, 1)
    return keys, values


def _prefill(
    q: torch.Tensor,
    layer: AttentionLayer,
    batch: ForwardBatch,
    part: _Part,
    out: torch.Tensor,
    table: torch.Tensor | None,
    index: Index | None,
) -> None:
    """q [T, H, D] → out [T, H, Dv]: the last T of the first `seq_len` positions of one request."""
    prefix_len = part.seq_len - q.shape[0]
    slots = CommonAttentionMetadata.of(batch).block_table[batch.req_pool_indices[part.request], : part.seq_len].long()
    k_buf, v_buf = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    for start in range(0, q.shape[0], QUERY_BLOCK):
        block = q[start : start + QUERY_BLOCK]
        last_key = part.seq_len if part.is_block else prefix_len + start + block.shape[0]
        first_key = 0
        if layer.params.window_left >= 0:
            first_key = max(0, prefix_len + start - layer.params.window_left)
        if layer.chunk:  # where a chunk begins, or attend_block would cut them elsewhere
            first_key = (prefix_len + start) // layer.chunk * layer.chunk
        seen = slots[first_key:last_key]
        keys = _take(k_buf, seen)
        values = keys[..., : layer.v_head_dim] if layer.is_latent else _take(v_buf, seen)
        first_query = prefix_len + start - first_key
        of_block = _part_of(index, start, start + QUERY_BLOCK)
        given = block, keys, values, first_query, layer, part.is_block, table, of_block
        out[start : start + QUERY_BLOCK] = attend_block(*given)


def _part_of(index: Index | None, start: int, end: int) -> Index | None:
    """The index of some tokens."""
    return None if index is None else tuple(one[start:end] for one in index)


def _take(buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """buffer[rows], in the cache's dtype; fp8 as bytes, which can be indexed on every device."""
    if buffer.dtype.itemsize > 1:
        return buffer.index_select(0, rows)
    return buffer.view(torch.uint8).index_select(0, rows).view(buffer.dtype)


def _grouped_sinks(layer: AttentionLayer) -> torch.Tensor | None:
    """[Hk, G, 1] sink logits, or None."""
    return None if layer.sink_logits is None else layer.sink_logits.reshape(layer.num_kv_heads, -1, 1)


def _slopes(layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
    """[H] float32, on the device of q."""
    return torch.tensor(layer.alibi_slopes, dtype=torch.float32, device=q.device)


def attend_block(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_query: int,
    layer: AttentionLayer,
    sees_ahead: bool,
    table: torch.Tensor | None = None,
    index: Index | None = None,
) -> torch.Tensor:
    """q [T, H, D] at positions first_query… of keys [L, Hk, D], values [L, Hk, Dv] → [T, H, Dv], causal unless
    `sees_ahead`; a window has earlier tokens. `table` is AttentionInputs' bias, `index` its index of
    the block."""
    params = layer.params
    positions = torch.arange(keys.shape[0], device=q.device)
    distance = positions[first_query : first_query + q.shape[0], None] - positions
    mask = torch.ones_like(distance, dtype=torch.bool) if sees_ahead else distance >= 0
    if params.window_left >= 0:
        mask &= distance <= params.window_left
    if layer.chunk:
        mask &= positions[first_query : first_query + q.shape[0], None] // layer.chunk == positions // layer.chunk
    if index is not None:
        chosen = chosen_keys(index, keys[:, 0, -layer.index_dim :], mask, layer.choice).transpose(0, 1)
        mask = chosen[0] if len(chosen) == 1 else chosen.repeat_interleave(layer.num_kv_heads // len(chosen), 0)
        keys = keys[..., : -layer.index_dim]
    q, keys, values = q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)  # [heads, tokens, D]
    is_plain = params.logits_soft_cap == 0 and layer.sink_logits is None and not layer.alibi_slopes and table is None
    if is_plain:
        return _attend_plainly(q, keys, values, mask, params.sm_scale).transpose(0, 1)
    group = layer.num_heads // layer.num_kv_heads
    # The G heads of a kv head become G * T queries of it: one product a kv head, and no copy of the keys.
    folded = q.unflatten(0, (layer.num_kv_heads, group)).flatten(1, 2)  # [Hk, G * T, D]
    sinks = _grouped_sinks(layer)
    if sinks is not None:
        sinks = sinks.repeat_interleave(q.shape[1], dim=1)  # [Hk, G * T, 1]
    bias = None
    if layer.alibi_slopes:
        bias = _slopes(layer, q)[:, None, None] * -distance  # [H, T, L]
        bias = bias.unflatten(0, (layer.num_kv_heads, group)).flatten(1, 2)
    elif table is not None:
        bias = of_distances(table, -distance).unflatten(0, (layer.num_kv_heads, group)).flatten(1, 2)
    folded = _attend(folded, keys, values, torch.cat([mask] * group, -2), layer, sinks, bias)
    unfolded: torch.Tensor = folded.unflatten(1, (group, -1)).flatten(0, 1).transpose(0, 1)
    return unfolded


def _attend_plainly(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """q [H, T, D], keys [Hk, L, D], values [Hk, L, Dv], mask [T, L] or [Hk, T, L] → [H, T, Dv]."""
    if mask.dim() == 3:  # one after another: a mask of all heads would take as many times the memory
        parts = zip(q.chunk(len(mask)), keys[:, None], values[:, None], mask, strict=True)
        return torch.cat([_attend_plainly(*part, sm_scale) for part in parts])
    return F.scaled_dot_product_attention(
        q[None],
        keys[None].to(q.dtype),
        values[None].to(q.dtype),
        attn_mask=mask,
        scale=sm_scale,
        enable_gqa=len(q) != len(keys),
    )[0]


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    layer: AttentionLayer,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention with the scores in the open: q [.., N, D], keys [.., L, D], values [.., L, Dv] → [.., N, Dv].

    Computed in float32 whatever the inputs are. `sinks` [.., N, 1] take part in the softmax and carry no value; `bias`
    [.., N, L] is added to the scores. All queries, which are [R, Hk, N, D] then, see `shared` besides, keys [Hk, P, D]
    and values [Hk, P, Dv]; `mask` and `bias` are of the others.
    """
    logits = (q.float() @ keys.float().transpose(-1, -2)) * layer.params.sm_scale
    if shared is not None:
        of_shared = _by_head(q.float(), shared[0].float().transpose(-1, -2)) * layer.params.sm_scale
        logits = torch.cat((of_shared, logits), dim=-1)
        mask = F.pad(mask, (of_shared.shape[-1], 0), value=True)
    cap = layer.params.logits_soft_cap
    if cap > 0:
        logits = cap * torch.tanh(logits / cap)
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.float().expand(*logits.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(logits, dim=-1)
    if shared is None:
        return (weights[..., : keys.shape[-2]] @ values.float()).to(q.dtype)
    count = shared[0].shape[-2]
    out = weights[..., count : count + keys.shape[-2]] @ values.float()
    return (out + _by_head(weights[..., :count], shared[1].float())).to(q.dtype)


def _by_head(x: torch.Tensor, of_heads: torch.Tensor) -> torch.Tensor:
    """x [R, Hk, N, A] · of_heads [Hk, A, B] → [R, Hk, N, B]: one product a head, of the rows of all requests."""
    folded = x.transpose(0, 1).flatten(1, 2) @ of_heads
    unfolded: torch.Tensor = folded.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)
    return unfolded
