"""Decodes that begin with the same pages, by the program's own kernels (ops/attention/cascade.py), which need no plan.

How many keys are shared is on the device, so that a captured decode is replayed for any number of them.

Shape legend: R requests, N blocks that a request's own keys are split among, M blocks for the shared ones, H query
heads, Hk kv heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.split.split_decode import DecodePiece
from mllm_compile.runtime.attention.split.splits import OF_MANY
from mllm_compile.runtime.device.upload import upload

# Blocks that the shared keys are split among: as many as an H100 runs at once, two a multiprocessor. One tile of query
# heads has no more than its parts are worth adding up.
_BLOCKS = 264
_MOST_PARTS = 16
_TILE_ROWS = 64  # ops/attention/cascade.py


class PieceCascade:
    """Runs as a decode wrapper does."""

    def __init__(self, piece: DecodePiece, batch: list[torch.Tensor], scratch: list[torch.Tensor]) -> None:
        """Args: batch: page_table [R, W] and seq_lens [R], int32."""
        self._piece = piece
        self._batch = batch
        self._scratch = scratch

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """q, out: [R, H, D]; pages: k and v, [pages, page_size, Hk, D]. Writes and returns out."""
        keys, values = (one.flatten(0, 1) for one in pages)
        self._piece([q.contiguous(), keys, values, *self._batch, out, *self._scratch])
        return out


class SharedPrefix:
    """The number of shared keys of the present batch, and scratch memory, shared by one backend's decodes."""

    def __init__(self, groups: Iterable[PlanGroup], max_requests: int, device: torch.device) -> None:
        """Args: groups: those that cascade."""
        self._shared_len = torch.zeros(1, dtype=torch.int32, device=device)
        self._num_shared = 0
        sizes = [_sizes(group, count) for group in groups for count in range(1, max_requests + 1)]
        own, own_heads, shared, shared_heads, heads, sequences = (max(size) for size in zip(*sizes, strict=True))

        def floats(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.float32, device=device)

        # Nothing of it lives from one call to the next; the kernels leave the counters at zero again.
        self._own = floats(own), floats(own_heads), floats(own_heads)
        self._shared = floats(shared), floats(shared_heads), floats(shared_heads)
        self._log_sums = floats(heads)
        self._done = torch.zeros(sequences, dtype=torch.int32, device=device)

    def share(self, num_tokens: int) -> None:
        """Says how many first keys are the same for all requests, to kernels that are launched from now on."""
        if num_tokens != self._num_shared:
            self._shared_len.copy_(upload(np.array([num_tokens], dtype=np.int32), self._shared_len.device))
            self._num_shared = num_tokens

    def prepare(
        self, piece: DecodePiece, group: PlanGroup, page_table: torch.Tensor, seq_lens: torch.Tensor
    ) -> PieceCascade:
        """Prepare decodes of as many requests as there are `seq_lens` [R] int32, read by the kernels when they run."""
        count, heads, dim = seq_lens.shape[0], group.num_heads, group.head_dim
        own = (count, OF_MANY.of(count * group.num_kv_heads), heads)
        shared = (_num_parts(group, count), count, heads)
        scratch = [
            *_views(self._own, own, dim),
            self._done[: count * group.num_kv_heads].view(count, -1),
            self._shared_len,
            *_views(self._shared, shared, dim),
            self._log_sums[: count * heads].view(count, heads),
        ]
        return PieceCascade(piece, [page_table[:count], seq_lens], scratch)


def _views(buffers: tuple[torch.Tensor, ...], shape: tuple[int, int, int], head_dim: int) -> list[torch.Tensor]:
    """Partial results [*shape, D], and the largest logits and sums of exponentials, `shape` each."""
    partial, tops, totals = buffers
    count = math.prod(shape)
    return [partial[: count * head_dim].view(*shape, head_dim), tops[:count].view(shape), totals[:count].view(shape)]


def _num_parts(group: PlanGroup, num_requests: int) -> int:
    """M: the number of requests alone decides it."""
    tiles = -(-num_requests * (group.num_heads // group.num_kv_heads) // _TILE_ROWS)
    return max(1, min(_BLOCKS // (tiles * group.num_kv_heads), _MOST_PARTS))


def _sizes(group: PlanGroup, num_requests: int) -> tuple[int, ...]:
    """Numbers of each kind of scratch that a batch takes."""
    own = num_requests * OF_MANY.of(num_requests * group.num_kv_heads) * group.num_heads
    shared = num_requests * _num_parts(group, num_requests) * group.num_heads
    sequences = num_requests * group.num_kv_heads
    return (
        own * group.head_dim,
        own,
        shared * group.head_dim,
        shared,
        num_requests * group.num_heads,
        sequences,
    )
