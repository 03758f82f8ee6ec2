"""Cuts keys and values that prompts make of their latents into parts; free of torch.

Shape legend: R prompts, N tiles of a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.attention.latent.tiles import EXPANDED_ROWS, TILE_FIELDS

# Memory for the keys and values of a part: with 16 heads of DeepSeek's widths 28,000 tokens, with 128 4,000.
MOST_EXPANDED_BYTES = 256 << 20

_FEWEST_SHARED_KEYS, _FEWEST_KEYS_OF_A_SHARE = 2048, 512  # results of shares are added up, by four launches
_MOST_SHARES = 8


@dataclass(frozen=True)
class KeyRange:
    """Keys start … stop of all that the chosen prompts see, one prompt's after the other's.

    Attributes:
        tiles: [N, 8] int32, as ops/attention/expanded.py takes them.
    """

    start: int
    stop: int
    tiles: np.ndarray


def key_ranges(first_tokens: np.ndarray, new: np.ndarray, before: np.ndarray, most_tokens: int) -> list[KeyRange]:
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
) -> KeyRange:
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
    return KeyRange(start, stop, tiles[longest_first])


def num_splits_of(parts: list[KeyRange], num_heads: int, num_blocks: int) -> int:
    """Blocks that share the keys of a tile where these parts leave most of the device idle.

    Args:
        num_blocks: that the device runs at once.
    """
    longest = max(part.stop - part.start for part in parts)
    if longest < _FEWEST_SHARED_KEYS:
        return 1
    idle = num_blocks // (num_heads * max(len(part.tiles) for part in parts))
    return max(1, min(idle, _MOST_SHARES, longest // _FEWEST_KEYS_OF_A_SHARE))
