"""Sizes of the blocks of rows that go to one expert, and limits of the kernels; free of Triton, for passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mllm_compile.runtime.cuda.units import UNIT_ROWS

if TYPE_CHECKING:
    from mllm_compile.runtime.quantised.scheme import WeightScheme

# choose.py: which softmax, and what it takes.
NO_SOFTMAX, SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN = 0, 1, 2
MOST_EXPERTS, MOST_CHOSEN = 1024, 32
# In place of an expert: one of another rank, whose rows are zeros here (passes/spread_experts.py). No router gives it.
ELSEWHERE = -(1 << 30)
# Steps of up to so many tokens have variants of their own (passes/group_experts.py). One token has no order to make.
VARIANT_TOKENS = (1, 64, 256)
ONE_ROW = 1  # the block of a step of one token: every row has an expert of its own
# The block of all steps where a row's numbers may not depend on the step's size. With 8 of 128 experts both products
# take 157, 316, 312 and 785 µs so for 8, 64, 256 and 2048 tokens on an H200; in blocks of 128 277, 573, 564 and 532.
ROWS_IN_ANY_STEP = 32
_FEWEST_ROWS, _MOST_ROWS = 16, 128  # 16 is what a product on tensor cores takes
_MOST_ROWS_AT_ONCE = 2048  # of one program
_GROUP_UNIT = 64  # inputs of a group are a multiple of it: four products take so many at least


def rows_of_block(most_tokens: int | None, num_chosen: int, num_experts: int) -> int:
    """Rows of a block in steps of up to `most_tokens` tokens (None: any number).

    A block holds twice the rows that an expert gets on average: with more blocks an expert its weight is read again,
    with larger ones products of nothing are computed.
    """
    if most_tokens is None:
        return _MOST_ROWS
    if most_tokens == 1:
        return ONE_ROW
    rows = _FEWEST_ROWS
    while rows < min(2 * most_tokens * num_chosen / num_experts, _MOST_ROWS):
        rows *= 2
    return rows


def rows_at_once(most_tokens: int | None, num_chosen: int) -> int:
    """The most rows of a step of up to `most_tokens` tokens, if one program lists them (order.py); else 0."""
    rows = (most_tokens or 0) * num_chosen
    return rows if rows <= _MOST_ROWS_AT_ONCE else 0


def takes_weight(kind: str, group: int, inputs: int) -> bool:
    """True if grouped_quantised.py takes a weight of so many inputs, in groups of so many that share a scale."""
    is_known = kind != "nvfp4" and not kind.endswith("_offsets")
    return is_known and inputs % 4 == 0 and (kind == "mxfp4" or group >= inputs or group % _GROUP_UNIT == 0)


def takes_part(scheme: WeightScheme, inputs: int, num_ranks: int) -> bool:
    """True if it takes a rank's part of such a weight, which is whole bytes, and whole groups or of one group."""
    own, rest = divmod(inputs, num_ranks)
    is_whole = scheme.group >= inputs or own % scheme.group == 0
    has_bytes = scheme.kind == "fp8" or own % 2 == 0
    return not rest and is_whole and has_bytes and takes_weight(scheme.kind, min(scheme.group, own), own)


def rows_of_unit(block: int) -> int:
    """A block's rows are a multiple of this, except an expert's last: larger blocks share an expert's rows evenly."""
    return min(block, UNIT_ROWS)


def most_blocks(num_rows: int, num_experts: int, block: int) -> int:
    """Blocks that suffice for any distribution of rows: rows of padding make a last group. Takes symbolic numbers
    too."""
    import torch

    least: int = torch.sym_min(num_rows, (num_rows + (num_experts + 1) * (block - 1)) // block)
    return least
