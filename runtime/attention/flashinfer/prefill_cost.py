"""Estimates the time of FlashInfer's prefill kernels for a batch from its lengths.

fa3 has 128 queries of a head in a block. fa2 has up to 128 rows, including the query heads of a KV head. It may divide
their keys among blocks; another kernel adds up their float32 sums. That costs more than all else unless there are few
queries: one prompt of 512 tokens of Qwen3-8B takes 58 µs so, and 16 and 11 by fa2 undivided and by fa3.

The constants are of an H200, FlashInfer 0.6.18, bfloat16, heads of 128; benchmarks/kernels/prefill_attention_speed.py
compares them. For other heads they are stretched, which was not measured.

Shape legend: R requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

_MEASURED_HEAD_DIM = 128

# In µs: to begin and end, and a key of a block that has a multiprocessor to itself.
_FA3_BEGIN, _FA3_KEY, _FA3_QUERIES = 5.3, 0.0137, 128
_FA3_KEY_IN_A_ROW = 0.0115  # of keys that are not in pages: they come by TMA, in larger tiles
_COPY_BEGIN, _COPY_BYTES = 4.0, 1.35e6  # to copy keys and values out of their pages: the launches, and bytes in a µs
_MERGE_BEGIN, _MERGE_BYTES = 4.0, 2.0e6  # to add up two results: the launch, and bytes in a µs
_FA3_UNEVEN = 1.3  # of several blocks a multiprocessor, as a causal mask makes them: the slowest to the average
_FA2_BEGIN, _FA2_KEY, _FA2_KEY_OF_SMALL_TILE = 4.0, 0.0325, 0.024
LEAST_US = _FA2_BEGIN  # by any kernel
_SPLIT_BEGIN, _SPLIT_ROW, _SPLIT_ROW_AND_KEY = 8.0, 0.003, 1.54e-6  # a row: of a query head


@dataclass(frozen=True)
class PrefillLoad:
    """The prefills of a batch, as one layer sees them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_lens: np.ndarray | int  # [R] new tokens; of one request an int, ten times as fast in Python
    prefix_lens: np.ndarray | int  # [R] keys before them that they see, likewise
    num_sms: int

    def fa3_us(self, in_a_row: bool = False) -> float:
        """Time of fa3; in_a_row: keys and values are in no pages."""
        return self._fa3_us(_FA3_KEY_IN_A_ROW if in_a_row else _FA3_KEY)

    def most_fa3_us(self) -> float:
        """A time that `fa3_us` does not exceed, found in a tenth of the time for few requests."""
        longest = total = 0
        for new, before in zip(_listed(self.query_lens), _listed(self.prefix_lens), strict=True):
            blocks = -(-new // _FA3_QUERIES)
            longest = max(longest, before + blocks * _FA3_QUERIES)
            total += blocks * (before + blocks * _FA3_QUERIES)
        return _FA3_BEGIN + _FA3_KEY * (longest + _FA3_UNEVEN * total * self.num_heads / self.num_sms) * self._width

    def copied_fa3_us(self) -> float:
        """Time of fa3 over contiguous keys and values, and of copying them out of their pages."""
        num_bytes = 4 * self.num_kv_heads * self.head_dim * _total(self.prefix_lens + self.query_lens)
        return _COPY_BEGIN + num_bytes / _COPY_BYTES + self._fa3_us(_FA3_KEY_IN_A_ROW)

    def divided_fa3_us(self, parts: int, in_a_row: bool = False) -> float:
        """Time of fa3 with the keys before one prompt's new tokens in `parts`, which blocks of their own read.

        The queries are copied for each part, the new tokens' own keys are a further part, and results are merged.
        """
        (new,), (before,) = _listed(self.query_lens), _listed(self.prefix_lens)
        waves = math.ceil(math.ceil(new / _FA3_QUERIES) * self.num_heads * parts / self.num_sms)
        num_bytes = 2 * self.num_heads * self.head_dim * new
        merges = (parts + 1) * (_MERGE_BEGIN + 3 * num_bytes / _MERGE_BYTES)
        own = replace(self, query_lens=new, prefix_lens=0)._fa3_us(_FA3_KEY_IN_A_ROW)
        key_us = _FA3_KEY_IN_A_ROW if in_a_row else _FA3_KEY
        return merges + own + _FA3_BEGIN + key_us * waves * before / parts * self._width

    def _fa3_us(self, key_us: float) -> float:
        keys, longest = self._block_keys(_FA3_QUERIES)
        longest = max(longest, _FA3_QUERIES)
        blocks_each = -(-self.query_lens // _FA3_QUERIES)
        blocks = _total(blocks_each) * self.num_heads
        of_prefix = _total(blocks_each * self.prefix_lens) / keys
        # Blocks behind a long prefix are alike, and run in waves.
        even = math.ceil(blocks / self.num_sms) * keys * self.num_heads / blocks
        uneven = _FA3_UNEVEN * keys * self.num_heads / self.num_sms
        keys_per_sm = of_prefix * even + (1 - of_prefix) * uneven
        return _FA3_BEGIN + key_us * max(longest, keys_per_sm) * self._width

    def fa2_us(self) -> float:
        """Time of fa2 with the keys of a query in one block."""
        group = self.num_heads // self.num_kv_heads
        tile = self._fa2_tile(group)
        keys, longest = self._block_keys(tile / group)
        key_us = _FA2_KEY if tile == 128 else _FA2_KEY_OF_SMALL_TILE
        return _FA2_BEGIN + key_us * max(longest, keys * self.num_kv_heads / self.num_sms) * self._width

    def split_fa2_us(self) -> float:
        """Time of fa2 with the keys of a query divided among blocks."""
        rows = self.query_lens * self.num_heads
        keys = self.prefix_lens + self.query_lens / 2
        return _SPLIT_BEGIN + _total(_SPLIT_ROW * rows + _SPLIT_ROW_AND_KEY * rows * keys) * self._width

    @property
    def _width(self) -> float:
        return self.head_dim / _MEASURED_HEAD_DIM

    def _fa2_tile(self, group: int) -> int:
        """Rows of a block, as FA2DetermineCtaTileQ in FlashInfer's utils.cuh has them."""
        mean = _total(self.query_lens) / len(_listed(self.query_lens)) * group
        if mean > 64 and self.head_dim < 256:
            return 128
        return 64 if mean > 16 else 16

    def _block_keys(self, queries: float) -> tuple[float, int]:
        """Keys that one head's blocks of `queries` each read in all, and the longest request's."""
        lens = self.query_lens
        blocks = math.ceil(lens / queries) if isinstance(lens, int) else np.ceil(lens / queries)
        keys = blocks * self.prefix_lens + queries * blocks * (blocks + 1) / 2
        return _total(keys), max(_listed(self.prefix_lens + self.query_lens))


def _listed(values: np.ndarray | int) -> list[int]:
    return [values] if isinstance(values, int) else values.tolist()


def _total(values: np.ndarray | float) -> float:
    return float(values.sum()) if isinstance(values, np.ndarray) else float(values)
