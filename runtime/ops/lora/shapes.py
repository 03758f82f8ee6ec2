"""The products of adapters that the kernels take, and their blocks. Free of torch and Triton.

Shape legend: K inputs, N outputs of a linear, r the rank of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_PARTS = 4  # of a packed linear
MOST_FEW_TOKENS = 64  # of a step whose products of A are divided among blocks
_FEWEST = 16  # rows or columns of a tensor core's product
_MOST_COLUMNS = 128
_INPUTS_OF_A_SPLIT = 512


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


def num_splits(inputs: int, is_few: bool) -> int:
    """Parts that sums over the inputs are divided into: few tokens are few blocks, with long chains of products."""
    return max(1, inputs // _INPUTS_OF_A_SPLIT) if is_few else 1


def padded_rank(rank: int) -> int:
    """The ranks that a product of tensor cores takes at once."""
    return min(64, max(_FEWEST, 1 << (rank - 1).bit_length()))
