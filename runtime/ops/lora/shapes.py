"""The products of adapters that the kernels take, and their blocks. Free of torch and Triton.

Shape legend: K inputs, N outputs of a linear, r the rank of adapters, L slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_PARTS = 4  # of a packed linear
MOST_FEW_TOKENS = 64  # of the variant of pieces that have no other one for few tokens
FEW_TOKENS, MANY_TOKENS, WRITTEN_TOKENS = 16, 64, 32  # of a block: of few tokens, and of many that read, that write
STRETCH_TOKENS, SHORT_TOKENS = 128, 1024  # that a block of many writes, so many at a time; of steps of more
SHORT_STEP = 512  # tokens of a step whose launches count more than what they read
APART_TOKENS = 512  # up to which a block of many that read has one slot: in longer steps such blocks are thousands
LONG_TOKENS, SPLITS_OF_LONG = 4096, 4  # from which on it has so many splits
INPUTS_OF_SPLIT = 512  # that one sum is of: with more, blocks of a few hundred tokens would be few
MOST_SLOTS = 16  # for which blocks of few tokens are of one adapter each, and of up to APART_TOKENS
_STAGES, _FURTHER_BYTES = 3, 8 << 10  # of tokens of a stretch; of shared memory besides, by a number's bytes
_FEWEST = 16  # rows or columns of a tensor core's product
_MOST_COLUMNS = 128
_CHAINED_COLUMNS, _MOST_CHAINED_SPLITS = 256, 64


def takes_lora(outputs: int, starts: Sequence[int], rows: Sequence[int]) -> bool:
    """True if the kernels take a linear of so many outputs, whose parts are these outputs of it."""
    return len(starts) <= MOST_PARTS and block_of_columns(outputs, starts, rows) >= _FEWEST


def takes_gated(outputs: int, starts: Sequence[int], rows: Sequence[int]) -> bool:
    """True if the kernel that ends with silu(gate) * up takes parts that are whole halves of the outputs, or one."""
    half = outputs // 2
    are_halves = list(starts) in ([0], [half], [0, half]) and all(count == half for count in rows)
    return outputs % 2 == 0 and are_halves and block_of_columns(half, [0], [half]) >= _FEWEST


def block_of_columns(outputs: int, starts: Sequence[int], rows: Sequence[int]) -> int:
    """Outputs that a block computes: a power of two that divides all parts."""
    whole = math.gcd(outputs, *starts, *rows)
    return min(whole & -whole, _MOST_COLUMNS)


def num_splits(inputs: int) -> int:
    """Sums that the products with A are left in."""
    return -(-inputs // INPUTS_OF_SPLIT)


def chained_columns(outputs: int) -> int:
    """Outputs of a block that also multiplies them with the next linear's A; 0: too few of them are a power of two."""
    columns = min(outputs & -outputs, _CHAINED_COLUMNS)
    return columns if columns >= _FEWEST and outputs // columns <= _MOST_CHAINED_SPLITS else 0


def stages_of(rank: int, columns: int, itemsize: int, shared_bytes: int) -> int:
    """Blocks of a stretch's tokens that are under way at once, of so many outputs each.

    With more ranks than a product takes at once each has the further rows of B with it, which shared memory must hold.
    """
    if rank <= padded_rank(rank):
        return _STAGES
    ranks = -(-rank // padded_rank(rank)) * padded_rank(rank)
    bytes_ahead = ranks * (columns + WRITTEN_TOKENS) * itemsize
    return max(1, min(_STAGES, 1 + (shared_bytes - _FURTHER_BYTES * itemsize) // bytes_ahead))


def padded_rank(rank: int) -> int:
    """The ranks that a product of tensor cores takes at once."""
    return min(64, max(_FEWEST, 1 << (rank - 1).bit_length()))
