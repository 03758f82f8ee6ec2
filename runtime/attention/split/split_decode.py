"""Decode by the program's own pieces (ops/attention/split_decode.py) and kernels (attention/hopper/): they read table
and lengths on the device, without a plan.

A step costs the host two small launches at most, for any number of requests and whatever the model's depth.

Shape legend: R requests, N blocks that a request's keys are split among, H query heads, Hk kv heads, D head dim,
W pages of a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.split.page_table import PageTable
from mllm_compile.runtime.attention.split.splits import Splits

# (q, keys, values, page_table, seq_lens, out, partial, tops, totals, done), as the op's arguments, the last four where
# it has splits, and the layer's sinks, if any. Kernels that rotate may get RopeInputs behind them, or may be told to
# start late.
DecodePiece = Callable[..., Any]


@dataclass(frozen=True)
class LinkedDecode:
    """A kernel that decodes batches of some size.

    Attributes:
        piece: a piece of the program, or kernels in its place.
        most_sequences: requests x KV heads that it serves; None: any number.
        splits: the splits of a piece that takes scratch for them; None: it takes none.
        fuses_rope: it writes new keys and values into the cache, and before it norms and rotates, where it is told to.
        tokens: rows that each request has, one behind another; more than one in verify steps.
    """

    piece: DecodePiece
    most_sequences: int | None = None
    splits: Splits | None = None
    fuses_rope: bool = False
    tokens: int = 1


LinkedDecodes = Sequence[LinkedDecode]  # of a layer: the smallest batches' first, the last for any number


def choose_decoder(decoders: LinkedDecodes, num_sequences: int) -> LinkedDecode:
    """The first decoder that serves a batch of so many requests x KV heads."""
    return next(one for one in decoders if one.most_sequences is None or num_sequences <= one.most_sequences)


class SplitDecodeSpace:
    """The page table of the present batch, scratch memory and counters, shared by one backend's decodes."""

    def __init__(
        self,
        groups: Iterable[tuple[PlanGroup, LinkedDecodes]],
        req_to_token: torch.Tensor,
        max_requests: int,
        page_size: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            groups: the groups that are served so, and their decoders.
            req_to_token: [rows, columns] int32: the slot of each position.
            dtype: the type of queries.
            cache_dtype: the type of keys and values; None: likewise.
        """
        self._dtype, self._cache_dtype = dtype, cache_dtype or dtype
        self._page_size = page_size
        device = req_to_token.device
        self._table = PageTable(req_to_token, max_requests, page_size)
        sizes = [_scratch_sizes(group, decoders, max_requests) for group, decoders in groups]
        num_partial, num_heads, num_sequences = (max(size) for size in zip(*sizes, strict=True))
        # Nothing of it lives from one kernel to the next; a kernel leaves the counters at zero again.
        self._partial = torch.empty(num_partial, dtype=torch.float32, device=device)
        self._tops = torch.empty(num_heads, dtype=torch.float32, device=device)
        self._totals = torch.empty_like(self._tops)
        self._done = torch.zeros(num_sequences, dtype=torch.int32, device=device)
        self._slopes: dict[tuple[float, ...], torch.Tensor] = {}
        self._fence = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    def slopes_of(self, group: PlanGroup) -> list[torch.Tensor]:
        """The slopes [H] float32 of a group with a bias by distance, for its kernels; else nothing."""
        slopes = group.alibi_slopes
        if not slopes:
            return []
        if slopes not in self._slopes:
            self._slopes[slopes] = torch.tensor(slopes, dtype=torch.float32, device=self.page_table.device)
        return [self._slopes[slopes]]

    def load(self, group: PlanGroup, decoders: LinkedDecodes) -> None:
        """Decode one token of the dummy page with each, which loads their kernels."""
        q = torch.zeros(1, group.num_heads, group.head_dim, dtype=self._dtype, device=self.page_table.device)
        page = q.new_zeros((1, self._page_size, group.num_kv_heads, group.head_dim), dtype=self._cache_dtype)
        one = torch.ones(1, dtype=torch.int32, device=q.device)
        sinks = q.new_zeros(group.num_heads) if group.has_sinks else None
        bias = q.new_zeros(group.num_heads, 1) if group.has_distance_bias else None
        self.list_pages(one.long() - 1)
        for decoder in decoders:
            decode = self.prepare(group, [replace(decoder, most_sequences=None)], one)
            decode.run(q, (page, page), torch.empty_like(q), sinks, bias)

    @property
    def page_table(self) -> torch.Tensor:
        """[max requests, W] int32, one row for each listed request."""
        return self._table.pages

    def list_pages(self, rows: torch.Tensor) -> None:
        """Write the page table of the requests in `rows` [R] int64; two launches, no wait."""
        self._table.list(rows)

    def prepare(
        self, group: PlanGroup, decoders: LinkedDecodes, seq_lens: torch.Tensor, behind_writes: bool = False
    ) -> SplitDecode:
        """Prepare the decodes of the first len(seq_lens) listed requests.

        Args:
            seq_lens: [R] int32, read by the kernel when it runs: at each replay anew if it is captured.
            behind_writes: a row may have keys of the same step beside its own, and all are in the cache.
        """
        num_requests = seq_lens.shape[0]
        num_sequences = num_requests * group.num_kv_heads
        chosen = choose_decoder(decoders, num_sequences)
        fence = self._fence if behind_writes else None
        pages, slopes = self.page_table[:num_requests], self.slopes_of(group)
        if chosen.splits is None:
            return SplitDecode(chosen, pages, seq_lens, [], slopes, fence)
        heads = (num_requests, _num_splits(chosen, num_sequences), group.num_heads)
        scratch = [
            self._partial[: math.prod(heads) * group.head_dim].view(*heads, group.head_dim),
            self._tops[: math.prod(heads)].view(heads),
            self._totals[: math.prod(heads)].view(heads),
            self._done[:num_sequences].view(num_requests, group.num_kv_heads),
        ]
        return SplitDecode(chosen, pages, seq_lens, scratch, slopes, fence)


class SplitDecode:
    """Runs as FlashInfer's decode wrappers do, without their plan."""

    def __init__(
        self,
        decoder: LinkedDecode,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scratch: list[torch.Tensor],
        slopes: Sequence[torch.Tensor] = (),
        fence: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            slopes: [H] float32 of layers with a bias by distance; else none.
            fence: any number, where all keys of the step have to be in the cache. The kernels fetch keys of earlier
                steps before the kernel ahead has ended, and take all but a row's own for such.
        """
        self._decoder = decoder
        self._batch = [page_table, seq_lens]
        self._scratch = scratch
        self._slopes = slopes
        self._fence = fence

    @property
    def seq_lens(self) -> torch.Tensor:
        """[R] int32, read by the kernel when it runs."""
        return self._batch[1]

    @property
    def fuses_rope(self) -> bool:
        """True if `run_with_rope` may be called."""
        return self._decoder.fuses_rope and self._fence is None

    def run(
        self,
        q: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q, out: [R, H, D]; pages: k and v, [pages, page_size, Hk, D]; sinks: [H], and bias [H, 2R + 1], if the layer
        has some. Writes and returns out."""
        of_layer = (*_typed(sinks, q), *self._slopes, *typed_bias(bias, q))
        inputs = [q.contiguous(), *_by_slot(pages), *self._batch, out, *self._scratch, *of_layer]
        if self._fence is None:
            self._decoder.piece(inputs)
        elif self._decoder.fuses_rope:
            self._decoder.piece(inputs, starts_early=False)
        else:
            self._fence.add_(0)  # a kernel that starts when all before have ended, and lets none start before its end
            self._decoder.piece(inputs)
        return out

    def run_with_rope(
        self,
        rope_inputs: RopeInputs,
        pages: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Like `run`, for keys and values that are not in the cache yet, and a q and k that may still be to rotate."""
        inputs = [rope_inputs.q[0], *_by_slot(pages), *self._batch, out]
        self._decoder.piece([*inputs, *_typed(sinks, rope_inputs.q)], rope_inputs)


def _typed(sinks: torch.Tensor | None, q: torch.Tensor) -> list[torch.Tensor]:
    """Sinks in the type that kernels are compiled for; a model may keep some weights in float32."""
    return [] if sinks is None else [sinks.to(q.dtype)]


def typed_bias(bias: torch.Tensor | None, q: torch.Tensor) -> list[torch.Tensor]:
    """A bias by distance [H, 2R + 1] as kernels are compiled for, where there is one."""
    return [] if bias is None else [bias.to(q.dtype).contiguous()]


def _by_slot(pages: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = pages
    return keys.flatten(0, 1), values.flatten(0, 1)


def _num_splits(decoder: LinkedDecode, num_sequences: int) -> int:
    return 0 if decoder.splits is None else decoder.splits.of(num_sequences)


def _scratch_sizes(group: PlanGroup, decoders: LinkedDecodes, max_requests: int) -> tuple[int, int, int]:
    """The largest batch's scratch: floats of partial results, pairs of a split and a query head, counters."""
    kv_heads = group.num_kv_heads
    batches = ((count, count * kv_heads) for count in range(1, max_requests + 1))
    splits = [count * _num_splits(choose_decoder(decoders, sequences), sequences) for count, sequences in batches]
    splits += [_num_splits(decoder, kv_heads) for decoder in decoders]  # load() runs each with one request
    return max(splits) * group.num_heads * group.head_dim, max(splits) * group.num_heads, max_requests * kv_heads
