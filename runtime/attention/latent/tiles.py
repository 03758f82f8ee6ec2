"""The tiles of attention over latents: rows of queries, and keys at a time; free of torch and Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tile:
    """The work of one block.

    Attributes:
        rows: query heads, of one token or of several; a power of two.
        keys: tokens whose latents are read at a time; a power of two.
        warps, stages: of the block, and of its loop over keys.
    """

    rows: int
    keys: int
    warps: int
    stages: int


_TILES = (Tile(16, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 32, 8, 3))
PREFILL_TILE = _TILES[-1]
# Of attention over keys and values made of latents: rows are tokens of a prompt, of one head.
EXPANDED_ROWS = 128
TILE_FIELDS = 8  # int32 numbers of each, two of them unused: they are at multiples of 16 bytes
_EXPANDED_TILE = Tile(EXPANDED_ROWS, 64, 8, 3)
_WIDE = 320  # numbers of a key and a value, beyond which there is room for fewer
_WIDE_TILE, _WIDE_TILE_BEFORE_HOPPER = Tile(EXPANDED_ROWS, 64, 8, 2), Tile(EXPANDED_ROWS, 32, 8, 2)


def decode_tile(num_heads: int) -> Tile:
    """The smallest tile that takes all heads of a token, or the largest."""
    return next((tile for tile in _TILES if num_heads <= tile.rows), _TILES[-1])


def expanded_tile(width: int, value_width: int, is_hopper: bool = True) -> Tile:
    """The tile of attention over keys of `width` and values of `value_width`, in shared memory; GPUs from Hopper on
    have most of it."""
    if width + value_width <= _WIDE:
        return _EXPANDED_TILE
    return _WIDE_TILE if is_hopper else _WIDE_TILE_BEFORE_HOPPER


def num_decode_tiles(num_heads: int) -> int:
    """Tiles that the heads of one token are."""
    return -(-num_heads // decode_tile(num_heads).rows)


def num_prefill_tiles(num_tokens: Any, num_heads: int) -> Any:
    """Tiles that the heads of a prompt's tokens are; of several prompts, if `num_tokens` is an array."""
    return -(-num_tokens * num_heads // PREFILL_TILE.rows)
