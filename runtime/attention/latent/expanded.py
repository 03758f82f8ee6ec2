"""A batch's prompts over keys and values that are made of their latents: choice.py says which prompts, expansion.py in
which parts.

Both backends run them so: on a GPU by the program's kernel (ops/latents/expanded.py), on a CPU by `attend_in_torch`.

Shape legend: T tokens, K keys of a part, N tiles, H query heads, P slots; n, r, v and C as in products.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mllm_compile.runtime.attention.flashinfer.plan import make_paged_view
from mllm_compile.runtime.attention.latent.choice import Choice, Prompts, Widths, all_of_them
from mllm_compile.runtime.attention.latent.expansion import parts_of
from mllm_compile.runtime.attention.latent.products import expand
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata
from mllm_compile.runtime.device.upload import upload

# (layer, K) → room for latents [K, C + r], and for keys and values [K, H, n + v]; until the next call.
Room = Callable[[AttentionLayer, int], tuple[torch.Tensor, torch.Tensor]]
# [q [T, H, n + r], keys and values [K, H, n + v], latents [K, C + r], tiles [N, 8], out [T, H, v], log_sums [T, H]]
Attend = Callable[[list[torch.Tensor]], object]


@dataclass(frozen=True)
class ExpandedPrompts:
    """The prompts of a batch that are expanded, and the rest of it.

    Attributes:
        others: the requests behind the decodes that are not.
        num_other_rows: the first so many tokens of the batch have all of the others, decodes included.
        parts: slots [K] int32 and tiles [N, 8] int32 of each, on the device.
    """

    others: np.ndarray
    num_other_rows: int
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @classmethod
    def plan(
        cls,
        common: CommonAttentionMetadata,
        num_decodes: int,
        widths: Widths,
        choice: Choice,
        most_tokens: int,
        most_rows: int,
    ) -> ExpandedPrompts:
        """
        Args:
            most_tokens: of a part, as there is room for.
            most_rows: likewise, of the new tokens that have all of the others: if there are more, none are others.
        """
        prompts = np.arange(num_decodes, common.num_reqs)
        starts = common.query_start_loc_cpu.numpy()
        new, before = np.diff(starts)[num_decodes:], common.num_computed_tokens_cpu.numpy()[num_decodes:]
        lengths = Prompts(widths, new, before, beside_decodes=num_decodes > 0)
        is_expanded = choice(lengths)
        if not is_expanded.all() and starts[prompts[~is_expanded][-1] + 1] > most_rows:
            is_expanded = all_of_them(lengths)
        others, chosen = prompts[~is_expanded], prompts[is_expanded]
        num_other_rows = int(starts[others[-1] + 1]) if len(others) else num_decodes
        if not len(chosen):
            return cls(others, num_other_rows)
        table, device = common.block_table, common.block_table.device
        rows = common.batch.req_pool_indices[num_decodes : common.num_reqs]
        if len(others):
            rows = rows.index_select(0, upload(chosen - num_decodes, device))
        num_keys = torch.from_numpy((before + new)[is_expanded])
        slots = make_paged_view(table, rows, num_keys, num_keys, -1, page_size=1).indices
        parts = parts_of(starts[chosen], new[is_expanded], before[is_expanded], most_tokens)
        tiles = upload(np.concatenate([part.tiles for part in parts]), device)
        ends = np.cumsum([len(part.tiles) for part in parts]).tolist()
        spans = zip(parts, [0, *ends], ends, strict=False)
        return cls(others, num_other_rows, tuple((slots[one.start : one.stop], tiles[a:b]) for one, a, b in spans))

    def run(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        attend: Attend,
        room: Room,
    ) -> None:
        """Writes the rows of `out` [T, H, v] that these prompts have, of q [T, H, n + r]; latents: [P, 1, C + r]."""
        log_sums = q.new_empty(q.shape[:2], dtype=torch.float32)
        for slots, tiles in self.parts:
            gathered, expanded = room(layer, slots.shape[0])
            _gather(latents[:, 0], slots, gathered)
            expand(gathered, layer, expanded)
            attend([q, expanded, gathered, tiles, out, log_sums])


def _gather(latents: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Writes latents[slots] [K, W] into `out`; eight bytes at a time where rows divide by them."""
    if latents.dtype != out.dtype:  # fp8, whose bytes can be indexed on every device
        out.copy_(latents.view(torch.uint8).index_select(0, slots).view(latents.dtype))
        return
    as_type = torch.int64 if latents.shape[1] * latents.dtype.itemsize % 8 == 0 else latents.dtype
    torch.index_select(latents.view(as_type), 0, slots, out=out.view(as_type))


def new_room(layer: AttentionLayer, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room that is not kept."""
    widths, weight = Widths.of(layer), layer.up_weight
    if weight is None:
        raise RuntimeError(f"attention layer {layer.name} has no up-projection of its own")
    return (
        weight.new_empty(num_keys, layer.head_dim),
        weight.new_empty(num_keys, widths.num_heads, widths.key + widths.value),
    )


def attend_in_torch(inputs: list[torch.Tensor], sm_scale: float) -> None:
    """Computes what mllm::expanded_prefill does, in float32 whatever the inputs are."""
    q, expanded, gathered, tiles, out, log_sums = inputs
    own = expanded.shape[2] - out.shape[2]  # n
    rotated = q.shape[2] - own
    for first, rows, first_key, num_keys, seen, is_added, *_ in tiles.tolist():
        num_keys = min(num_keys, seen + rows - 1)  # those behind, no row sees
        keys = expanded[first_key : first_key + num_keys].transpose(0, 1).float()  # [H, K, n + v]
        rest = gathered[first_key : first_key + num_keys, -rotated:].float()
        queries = q[first : first + rows].transpose(0, 1).float()  # [H, rows, n + r]
        logits = queries[..., :own] @ keys[..., :own].transpose(1, 2) + queries[..., own:] @ rest.t()
        places = torch.arange(num_keys, device=q.device)
        visible = places < seen + torch.arange(rows, device=q.device)[:, None]
        logits = (logits * sm_scale).masked_fill(~visible, float("-inf"))
        got = (logits.softmax(-1) @ keys[..., own:]).transpose(0, 1)  # [rows, H, v]
        sums = logits.logsumexp(-1).t()
        if is_added:
            before = log_sums[first : first + rows]
            sums, share = torch.logaddexp(before, sums), torch.sigmoid(sums - before)
            got = torch.lerp(out[first : first + rows].float(), got, share[..., None])
        out[first : first + rows] = got.to(out.dtype)
        log_sums[first : first + rows] = sums
