"""The products of adapters that the kernels take, and their blocks. Free of torch and Triton.

Kernels have three forms, each right for any number of tokens: for few, some and many. A token's bits are the same by
the last two.

Shape legend: K inputs, N outputs of a linear, r the rank of adapters, L slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Form = Literal["few", "some", "many"]
MOST_PARTS = 4  # of a packed linear
MOST_FEW_TOKENS = 64  # of the variant of pieces that have no other one for few tokens
MOST_SOME_TOKENS = 1024  # of the further one: products with A are in several sums, as blocks would be few
FEW_TOKENS, MANY_TOKENS, WRITTEN_TOKENS = 16, 64, 32  # of a block: of few tokens, and of more that read, that write
STRETCH_TOKENS = 128  # that a block of many writes, so many at a time
QUARTER_TOKENS, HALF_TOKENS = 3072, 6144  # of many, up to which a block reads a quarter or a half of MANY_TOKENS
INPUTS_OF_SPLIT = 512  # that one sum is of
MOST_SLOTS = 16  # for which blocks of few and of some tokens are of one adapter each
_STAGES, _FURTHER_BYTES = 3, 8 << 10  # that are under way at once; of shared memory besides, by a number's bytes
_MANY_STAGES = 4  # of inputs and A of many tokens, as a block has an SM to itself; else _STAGES, for two on each
LEAST_SHARED_BYTES = 99 << 10  # of the GPUs that there are kernels for
_FEWEST = 16  # rows or columns of a tensor core's product
MOST_COLUMNS = 128
WIDE_COLUMNS = 256  # of a block that adds up sums of some tokens, each once
_CHAINED_COLUMNS, _MOST_CHAINED_SPLITS = 256, 64


def takes_lora(outputs: int, starts: Sequence[int], rows: Sequence[int]) -> bool:
    """True if the kernels take a linear of so many outputs, whose parts are these outputs of it."""
    return len(starts) <= MOST_PARTS and block_of_columns(outputs, starts, rows) >= _FEWEST


def takes_gated(outputs: int, starts: Sequence[int], rows: Sequence[int]) -> bool:
    """True if the kernel that ends with silu(gate) * up takes parts that are whole halves of the outputs, or one."""
    half = outputs // 2
    are_halves = list(starts) in ([0], [half], [0, half]) and all(count == half for count in rows)
    return outputs % 2 == 0 and are_halves and block_of_columns(half, [0], [half]) >= _FEWEST


def block_of_columns(outputs: int, starts: Sequence[int], rows: Sequence[int], most: int = MOST_COLUMNS) -> int:
    """Outputs that a block computes: a power of two that divides all parts."""
    whole = math.gcd(outputs, *starts, *rows)
    return min(whole & -whole, most)


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


def read_stages_of(form: str, block_bytes: int, shared_bytes: int) -> int:
    """Blocks of inputs and A, of so many bytes each, that are under way at once."""
    return min(_MANY_STAGES if form == "many" else _STAGES, shared_bytes // block_bytes)


def padded_rank(rank: int) -> int:
    """The ranks that a product of tensor cores takes at once."""
    return min(64, max(_FEWEST, 1 << (rank - 1).bit_length()))
