"""Each token sees the states of images that the mask of Transformers' processor shows it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.flashinfer.plan import make_paged_view
from mllm_compile.runtime.media.tiles import TileTower
from mllm_compile.runtime.memory_pool import ReqToTokenPool
from mllm_compile.runtime.sources.images import AHEAD, SeenImages
from tests.tiny_seen_images import IMAGE_TOKEN, SIDE, STATES, TILES, mask_of


def tower_of(page_size: int) -> TileTower:
    return TileTower(
        feature_width=64,
        image_token_id=IMAGE_TOKEN,
        tiles=TILES,
        shape=(3, SIDE, SIDE),
        states=STATES,
        ratios=8,
        page_size=page_size,
    )


@pytest.mark.parametrize("seed", range(20))
def test_each_token_sees_the_states_of_its_mask(seed: int) -> None:
    chosen, page_size = random.Random(seed), random.Random(seed).choice((1, 4, 16))
    ids = [IMAGE_TOKEN if chosen.random() < 0.4 else 5 for _ in range(chosen.randint(1, 12))] + [IMAGE_TOKEN, 6]
    places = [index for index, one in enumerate(ids) if one == IMAGE_TOKEN]
    tiles = [chosen.randint(1, TILES) for _ in places]
    seen = SeenImages.of(tower_of(page_size), places, [(1, count, 1) for count in tiles])
    stored: dict[int, tuple[int, int]] = {}
    for image, (states, at) in enumerate(seen.places):
        for state, place in zip(states.tolist(), at.tolist(), strict=True):
            assert place not in stored and place < seen.length
            stored[place] = image, state
    kinds, firsts, lengths = seen.of_tokens(0, len(ids))
    mask = mask_of(ids, tiles)[0]
    for token, (kind, first, length) in enumerate(zip(kinds, firsts, lengths, strict=True)):
        assert first % page_size == 0
        found = sorted(stored[place] for place in range(first, first + length))
        shown = np.argwhere(mask[token]).tolist()
        assert (kind == AHEAD) == (not shown)
        if not shown:  # a row that masks all is one that masks nothing
            shown = [[image, tile] for image in range(len(places)) for tile in range(TILES)]
        assert found == [(image, tile * STATES + state) for image, tile in shown for state in range(STATES)]
    behind = seen.of_tokens(len(ids) + 3, 2)
    assert [part.tolist() for part in behind] == [[part[-1]] * 2 for part in (kinds, firsts, lengths)]


def test_a_table_has_a_row_from_each_page() -> None:
    pool = ReqToTokenPool(2, 12, "cpu")
    pool.req_to_token.copy_(pool.req_to_token.new_tensor(range(36)).view(3, 12))
    rows = pool.from_each_page(4).req_to_token
    assert rows.shape == (7, 12)
    assert rows[4].tolist() == list(range(16, 28))  # row 1 from its second page on
    assert rows[6].tolist() == list(range(24, 36))


def test_pages_of_a_row_that_begins_within_another_are_listed_without_a_copy_of_all() -> None:
    pool = ReqToTokenPool(2, 12, "cpu")
    pool.req_to_token.copy_((torch.arange(36, dtype=torch.int32) + 400).view(3, 12))  # pages 100 to 108
    table = pool.from_each_page(4).req_to_token
    lengths = torch.tensor([5, 1, 9], dtype=torch.int32)
    view = make_paged_view(table, torch.tensor([4, 6, 0]), lengths, lengths - 1, -1, 4)
    assert view.indices.tolist() == [104, 105, 106, 100, 101, 102]
    assert view.indptr_cpu.tolist() == [0, 2, 3, 6]
