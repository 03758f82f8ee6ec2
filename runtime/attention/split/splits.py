"""Chooses the number of blocks that decodes by ops/attention/split_decode.py and ops/attention/latent.py split a
request's keys among; free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Splits:
    """
    Attributes:
        blocks: blocks of all sequences (requests x KV heads), about as many as an H200 runs at once: a
            multiprocessor has room for two of the piece for few requests, for 4 of the other.
        most: most blocks of one sequence; the piece is compiled for it. A power of two without `keys`.
        keys: of every split. Then a sequence has blocks for all splits or one, and its numbers are the same. 0: keys
            are divided evenly.
    """

    blocks: int
    most: int
    keys: int = 0

    def of(self, num_sequences: int) -> int:
        if self.keys:
            return self.most if num_sequences * self.most <= self.blocks else 1
        return max(1, min(self.blocks // num_sequences, self.most))


OF_FEW = Splits(blocks=256, most=32)
OF_MANY = Splits(blocks=512, most=8)
MOST_FEW_SEQUENCES = 64  # it was measured to be faster for them (benchmarks/kernels/decode_attention_speed.py)
# A block over latents fills a multiprocessor; a sequence is a tile of query heads of a request (latent/tiles.py).
OF_LATENTS = Splits(blocks=132, most=64)

_KEYS = 256
_BLOCKS = 2048  # of which those without keys end at once: 16 requests of 4,096 tokens and 8 KV heads


def splits_in_order(most_keys: int) -> Splits:
    """Splits whose sums have one order, whatever else is in the step, of requests of up to so many keys."""
    return Splits(_BLOCKS, math.ceil(most_keys / _KEYS), _KEYS)
