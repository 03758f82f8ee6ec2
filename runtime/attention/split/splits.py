"""Chooses the number of blocks that decodes by ops/attention/split_decode.py and ops/attention/latent.py split a
request's keys among; free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Splits:
    """
    Attributes:
        blocks: blocks of all sequences (requests x KV heads), about as many as an H200 runs at once: a
            multiprocessor has room for two of the piece for few requests, for 4 of the other. None: any number, and
            each sequence has room for `most`.
        most: most splits of one sequence, a power of two; the piece is compiled for it.
    """

    blocks: int | None
    most: int

    def of(self, num_sequences: int) -> int:
        if self.blocks is None:
            return self.most
        return max(1, min(self.blocks // num_sequences, self.most))


OF_FEW = Splits(blocks=256, most=32)
OF_MANY = Splits(blocks=512, most=8)
OF_ONE = Splits(blocks=1, most=1)  # a request's keys are in one order, whatever else is in the step
MOST_FEW_SEQUENCES = 64  # it was measured to be faster for them (benchmarks/kernels/decode_attention_speed.py)
# A block over latents fills a multiprocessor; a sequence is a tile of query heads of a request (latent/tiles.py).
OF_LATENTS = Splits(blocks=132, most=64)

# Parts of a row's keys, whose sums have one order, whatever else is in the step (ops/attention/ordered_decode.py).
IN_ORDER = Splits(blocks=None, most=16)
# Blocks of a sequence among which these are divided, by the most sequences; with more a sequence has one.
BLOCKS_IN_ORDER = {32: 16, 64: 8, 128: 4}
