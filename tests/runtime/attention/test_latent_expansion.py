"""The parts that keys and values of prompts are cut into."""

from __future__ import annotations

import numpy as np
import pytest

from mllm_compile.runtime.attention.latent.expansion import key_ranges, num_splits_of
from mllm_compile.runtime.attention.latent.tiles import EXPANDED_ROWS


@pytest.mark.parametrize("most_tokens", [1, 7, 100, 128, 333, 10_000])
def test_every_token_meets_each_of_its_keys_once_and_in_order(most_tokens):
    new, before = np.array([1, 300, 5, 129]), np.array([0, 10, 600, 0])
    first = np.array([4, 5, 400, 410])
    rows, keys = 410 + 129, int((new + before).sum())
    starts = np.cumsum(new + before) - new - before
    met = np.zeros((rows, keys), dtype=int)
    parts = key_ranges(first, new, before, most_tokens)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])] and parts[-1].stop == keys
    for part in parts:
        assert 0 < part.stop - part.start <= most_tokens
        tiles, found = part.tiles[:, :6].tolist(), []
        for token, count, key, num_keys, seen, is_added in tiles:
            assert 0 < count <= EXPANDED_ROWS and seen >= 1
            for row in range(count):
                assert met[token + row].any() == bool(is_added), "added to what earlier parts left"
            found += [(token + row, part.start + key, min(seen + row, num_keys)) for row in range(count)]
        for row, key, count in found:
            met[row, key : key + count] += 1
        assert len({row for row, *_ in found}) == len(found), "a token has one tile of a part"
        ends = [min(seen + count, num_keys) for _, count, _, num_keys, seen, _ in tiles]
        assert ends == sorted(ends, reverse=True), "the longest come first"
    for token, count, prefix, start in zip(first, new, before, starts, strict=True):
        for row in range(count):
            wanted = np.zeros(keys, dtype=int)
            wanted[start : start + prefix + row + 1] = 1
            np.testing.assert_array_equal(met[token + row], wanted)
            met[token + row] = 0
    assert not met.any(), "no other token is given any"


@pytest.mark.parametrize(
    ("new", "before", "heads", "splits"),
    [
        ([64], [8192], 16, 8),  # 16 blocks of 132
        ([256], [8192], 16, 4),
        ([512], [31744], 16, 2),
        ([512], [31744], 40, 1),  # 160 blocks
        ([64], [1500], 16, 1),  # few keys
        ([8, 8], [1200, 1200], 16, 4),  # as many for each, of one part
    ],
)
def test_blocks_share_keys_where_most_of_the_device_would_be_idle(new, before, heads, splits):
    parts = key_ranges(np.cumsum(new) - new, np.array(new), np.array(before), 20_000)
    assert num_splits_of(parts, heads, 132) == splits
    assert num_splits_of(parts, heads, 0) == 1  # of a device whose blocks are not counted


def test_of_no_prompts_there_are_no_parts():
    none = np.zeros(0, dtype=np.int32)
    assert key_ranges(none, none, none, 10) == []
