"""The tiles of prompts that ops/attention/prefill.py attends for, a block each; free of torch."""

from __future__ import annotations

import numpy as np

TILE_TOKENS = 128


def list_tiles(starts: np.ndarray, prefix_lens: np.ndarray, first_request: int) -> np.ndarray:
    """Lists the tiles [N, 4] int32 as the op takes them, those with the most keys first: no long one begins when the
    others have ended.

    Args:
        starts: [R + 1] where each prompt's new tokens start in the batch.
        prefix_lens: [R] tokens before these.
        first_request: the place of the first prompt among the batch's requests.
    """
    num_tokens = np.diff(starts)
    counts = -(-num_tokens // TILE_TOKENS)
    of_tile = np.repeat(np.arange(num_tokens.size), counts)
    first_tiles = np.cumsum(counts) - counts
    first = (np.arange(of_tile.size) - first_tiles[of_tile]) * TILE_TOKENS
    tiles = np.stack((first_request + of_tile, starts[of_tile], num_tokens[of_tile], first), axis=1)
    order = np.argsort(-(prefix_lens[of_tile] + first), kind="stable")
    return np.ascontiguousarray(tiles[order], dtype=np.int32)
