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
        most: most splits of one sequence; the piece is compiled for it. A power of two without `keys`.
        keys: of every split. Then scratch has room for all splits of a sequence, and its numbers do not depend on the
            blocks among which these are divided. 0: keys are divided evenly.
    """

    blocks: int
    most: int
    keys: int = 0

    def of(self, num_sequences: int) -> int:
        if self.keys:
            return self.most
        return max(1, min(self.blocks // num_sequences, self.most))


OF_FEW = Splits(blocks=256, most=32)
OF_MANY = Splits(blocks=512, most=8)
OF_ONE = Splits(blocks=1, most=1)  # a request's keys are in one order, whatever else is in the step
MOST_FEW_SEQUENCES = 64  # it was measured to be faster for them (benchmarks/kernels/decode_attention_speed.py)
# A block over latents fills a multiprocessor; a sequence is a tile of query heads of a request (latent/tiles.py).
OF_LATENTS = Splits(blocks=132, most=64)

# With few sequences each split has a block of its own; those without keys end at once.
MOST_FEW_IN_ORDER = 128
_KEYS, _MOST_IN_ORDER = 256, 16


def splits_in_order(most_keys: int) -> Splits:
    """Splits whose sums have one order, whatever else is in the step, of requests of up to so many keys.

    Keys of a split are in the runtime's key: a request of more keys than splits have room for has other numbers.
    """
    keys = max(_KEYS, math.ceil(most_keys / _MOST_IN_ORDER / _KEYS) * _KEYS)
    return Splits(1, _MOST_IN_ORDER, keys)
