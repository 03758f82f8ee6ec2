"""A batch's prompts over keys and values that are expanded from their latents: choice.py chooses the prompts,
expansion.py the parts.

Both backends run them so: on a GPU by the program's kernel (ops/attention/expanded.py), on a CPU by `attend_in_torch`.

Shape legend: T tokens, K keys of a part, N tiles, S blocks that share a tile's keys, H query heads, P slots; n, r, v
and C as in products.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mllm_compile.runtime.attention.flashinfer.plan import make_paged_view
from mllm_compile.runtime.attention.latent.choice import ExpansionChoice, PromptSizes, Widths, all_of_them
from mllm_compile.runtime.attention.latent.expansion import key_ranges, num_splits_of
from mllm_compile.runtime.attention.latent.products import expand
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata
from mllm_compile.runtime.device.upload import upload

# K → room for latents [K, C + r], and for keys and values [K, H, n + v]; until the next call.
Room = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
# [q [T, H, n + r], keys and values [K, H, n + v], latents [K, C + r], tiles [N, 8], out [T, H, S, v],
# log_sums [T, H, S]]
Attend = Callable[[list[torch.Tensor]], object]


@dataclass(frozen=True)
class ExpandedPrompts:
    """The prompts of a batch that are expanded, and the rest of it.

    Attributes:
        others: the requests behind the decodes that are not.
        num_other_rows: the first so many tokens of the batch have all of the others, decodes included.
        parts: slots [K] int32 and tiles [N, 8] int32 of each, on the device.
        num_splits: blocks that share a tile's keys; 1, if there are others.
    """

    others: np.ndarray
    num_other_rows: int
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    num_splits: int = 1

    @classmethod
    def plan(
        cls,
        common: CommonAttentionMetadata,
        num_decodes: int,
        widths: Widths,
        choice: ExpansionChoice,
        most_tokens: int,
        most_rows: int,
        num_blocks: int = 0,
    ) -> ExpandedPrompts:
        """Chooses among the prompts of a batch, and lists what the kernel reads; the device is not waited for.

        Args:
            most_tokens: of a part, as there is room for.
            most_rows: likewise, of the new tokens that have all of the others: if there are more, none are others.
            num_blocks: that the device runs at once; 0: keys are not shared among blocks.
        """
        prompts = np.arange(num_decodes, common.num_reqs)
        starts = common.query_start_loc_cpu.numpy()
        new, before = np.diff(starts)[num_decodes:], common.num_computed_tokens_cpu.numpy()[num_decodes:]
        lengths = PromptSizes(widths, new, before, beside_decodes=num_decodes > 0)
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
        parts = key_ranges(starts[chosen], new[is_expanded], before[is_expanded], most_tokens)
        tiles = upload(np.concatenate([part.tiles for part in parts]), device)
        ends = np.cumsum([len(part.tiles) for part in parts]).tolist()
        spans = zip(parts, [0, *ends], ends, strict=False)
        return cls(
            others,
            num_other_rows,
            tuple((slots[one.start : one.stop], tiles[a:b]) for one, a, b in spans),
            1 if len(others) else num_splits_of(parts, widths.num_heads, num_blocks),
        )

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
        shape = (*out.shape[:2], self.num_splits)
        log_sums = q.new_empty(shape, dtype=torch.float32)
        results = out.unsqueeze(2) if self.num_splits == 1 else q.new_empty(*shape, out.shape[2])
        for slots, tiles in self.parts:
            gathered, expanded = room(slots.shape[0])
            _gather(latents[:, 0], slots, gathered)
            expand(gathered, layer, expanded)
            attend([q, expanded, gathered, tiles, results, log_sums])
        if self.num_splits > 1:
            new = slice(self.num_other_rows, None)
            out[new] = (results[new] * log_sums[new].softmax(-1).unsqueeze(-1)).sum(2)


def _gather(latents: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Writes latents[slots] [K, W] into `out`; eight bytes at a time where rows divide by them."""
    if latents.dtype != out.dtype:  # fp8, whose bytes can be indexed on every device
        out.copy_(latents.view(torch.uint8).index_select(0, slots).view(latents.dtype))
        return
    as_type = torch.int64 if latents.shape[1] * latents.dtype.itemsize % 8 == 0 else latents.dtype
    torch.index_select(latents.view(as_type), 0, slots, out=out.view(as_type))


def new_room(widths: Widths, like: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room that is not kept, of the type of `like`."""
    of_keys_and_values = num_keys, widths.num_heads, widths.key + widths.value
    return like.new_empty(num_keys, widths.cached), like.new_empty(of_keys_and_values)


def attend_in_torch(inputs: list[torch.Tensor], sm_scale: float) -> None:
    """Computes what mllm::expanded_prefill does, in float32 whatever the inputs are."""
    q, expanded, gathered, tiles, out, log_sums = inputs
    num_splits, value_width = out.shape[2:]
    own = expanded.shape[2] - value_width  # n
    rotated = q.shape[2] - own
    for first, rows, first_key, num_keys, seen, is_added, *_ in tiles.tolist():
        last = min(num_keys, seen + rows - 1)  # those behind, no row sees
        share = -(-last // num_splits)
        for split in range(num_splits):
            start, end = min(split * share, last), min((split + 1) * share, last)
            keys = expanded[first_key + start : first_key + end].transpose(0, 1).float()  # [H, K, n + v]
            rest = gathered[first_key + start : first_key + end, -rotated:].float()
            queries = q[first : first + rows].transpose(0, 1).float()  # [H, rows, n + r]
            logits = queries[..., :own] @ keys[..., :own].transpose(1, 2) + queries[..., own:] @ rest.t()
            places = torch.arange(start, end, device=q.device)
            visible = places < seen + torch.arange(rows, device=q.device)[:, None]
            logits = (logits * sm_scale).masked_fill(~visible, float("-inf"))
            sums = logits.logsumexp(-1)
            weights = (logits - sums[..., None]).exp().nan_to_num(0.0)  # 0 in rows that see none of these keys
            got, sums = (weights @ keys[..., own:]).transpose(0, 1), sums.t()  # [rows, H, v]
            place = slice(first, first + rows), slice(None), split
            if is_added:
                before = log_sums[place]
                share_of = torch.sigmoid(sums - before).nan_to_num(0.0)  # of these keys
                got, sums = torch.lerp(out[place].float(), got, share_of[..., None]), torch.logaddexp(before, sums)
            out[place] = got.to(out.dtype)
            log_sums[place] = sums
