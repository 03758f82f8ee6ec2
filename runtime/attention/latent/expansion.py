"""Chooses the prompts that attend over keys and values made of their latents, and cuts these into parts; free of torch.

All that counts is known on the host: how many tokens are new, and how many lie before them.

Shape legend: R prompts, H query heads, N tiles of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.attention.latent.tiles import EXPANDED_ROWS, TILE_FIELDS
from mllm_compile.runtime.attention.layer import LayerSpec

# Memory for the keys and values of a part: with 16 heads of DeepSeek's widths 28,000 tokens, with 128 4,000.
MOST_EXPANDED_BYTES = 256 << 20

# The time of a multiplication against that of one in a large product: in the kernel over latents, in the kernel over
# keys and values, and in the product that makes these, as it writes so much. And multiplications in the time that a
# layer's further launches take.
_OVER_LATENTS = 3.6
_OVER_EXPANDED = 1.9
_EXPANDING = 1.5
_LAUNCHES = 8e9


@dataclass(frozen=True)
class Widths:
    """The widths that the estimate depends on; layers alike in them share a plan.

    Attributes:
        num_heads: H; key: n, of a head's keys that are made of a latent; rotated: r, the rest; value: v; rank: of a
            latent.
    """

    num_heads: int
    key: int
    rotated: int
    value: int
    rank: int

    @classmethod
    def of(cls, layer: LayerSpec) -> Widths:
        return cls(layer.num_heads, layer.up_key_dim, layer.rotated_dim, layer.up_value_dim, layer.v_head_dim)

    @property
    def numbers_of_a_token(self) -> int:
        """Numbers that one token of a part takes: its keys and values, and the latent that they are made of."""
        return self.num_heads * (self.key + self.value) + self.rank + self.rotated

    @property
    def numbers_of_a_row(self) -> int:
        """Numbers that a new token takes which attends over latents: its queries, and their sums of latents."""
        return self.num_heads * (2 * self.rank + self.rotated)


# (new tokens [R], tokens before them [R], widths) → [R] bool: the prompts that are expanded.
Choice = Callable[[np.ndarray, np.ndarray, Widths], np.ndarray]


def those_that_pay(new: np.ndarray, before: np.ndarray, widths: Widths) -> np.ndarray:
    """The prompts that are estimated to take less time expanded; none where all of them together do not pay."""
    new, before = new.astype(np.float64), before.astype(np.float64)
    up = widths.rank * (widths.key + widths.value)  # multiplications a head to make one token's keys and values, or
    # to apply the same weight to its queries and its output instead
    pairs = new * (before + new / 2)
    over_latents = new * up + _OVER_LATENTS * pairs * (2 * widths.rank + widths.rotated)
    rows = np.ceil(new / EXPANDED_ROWS) * EXPANDED_ROWS
    seen = rows * (before + (new + EXPANDED_ROWS) / 2)
    expanded = _EXPANDING * (before + new) * up + _OVER_EXPANDED * seen * (widths.key + widths.rotated + widths.value)
    gains = widths.num_heads * (over_latents - expanded)
    pays = gains > 0
    return pays if gains[pays].sum() > _LAUNCHES else np.zeros_like(pays)


def none_of_them(new: np.ndarray, before: np.ndarray, widths: Widths) -> np.ndarray:
    """A choice of no prompt."""
    return np.zeros(len(new), dtype=bool)


def all_of_them(new: np.ndarray, before: np.ndarray, widths: Widths) -> np.ndarray:
    """A choice of every prompt."""
    return np.ones(len(new), dtype=bool)


@dataclass(frozen=True)
class Part:
    """Keys start … stop of all that the chosen prompts see, one prompt's after the other's.

    Attributes:
        tiles: [N, 8] int32, as ops/latents/expanded.py takes them.
    """

    start: int
    stop: int
    tiles: np.ndarray


def parts_of(first_tokens: np.ndarray, new: np.ndarray, before: np.ndarray, most_tokens: int) -> list[Part]:
    """The parts that chosen prompts are computed in, in order: a prompt that reaches into a further part is added up.

    Args:
        first_tokens: [R] int: the row of each prompt's first new token.
        most_tokens: of a part.
    """
    lengths = before + new
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return [
        _part(first_tokens, new, before, ends - lengths, start, min(total, start + most_tokens))
        for start in range(0, total, most_tokens)
    ]


def _part(
    first_tokens: np.ndarray, new: np.ndarray, before: np.ndarray, starts: np.ndarray, start: int, stop: int
) -> Part:
    inside = (starts < stop) & (starts + before + new > start)
    first_tokens, new, before, starts = (array[inside] for array in (first_tokens, new, before, starts))
    first_key, last_key = np.maximum(start - starts, 0), np.minimum(stop - starts, before + new)
    first_query = np.maximum(first_key - before, 0)  # the first new token that sees any of these keys
    counts = -(-(new - first_query) // EXPANDED_ROWS)
    of = np.repeat(np.arange(len(new)), counts)
    index = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    query = first_query[of] + index * EXPANDED_ROWS
    rows = np.minimum(new[of] - query, EXPANDED_ROWS)
    num_keys, seen = (last_key - first_key)[of], before[of] + query + 1 - first_key[of]
    fields = first_tokens[of] + query, rows, (starts + first_key - start)[of], num_keys, seen, first_key[of] > 0
    tiles = np.zeros((len(of), TILE_FIELDS), dtype=np.int32)
    tiles[:, : len(fields)] = np.stack(fields, axis=1)
    longest_first = np.argsort(-np.minimum(seen + rows, num_keys), kind="stable")
    return Part(start, stop, tiles[longest_first])
