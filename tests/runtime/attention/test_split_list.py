"""The list of work whose keys are divided among blocks, read as FlashInfer's fa2 does (0.6.18:
BatchPrefillWithPagedKVCacheDevice and VariableLengthMergeStates)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.flashinfer.work_list import SplitList

PAGE, MOST_ROWS = 16, 5


def read(works: SplitList, memory: np.ndarray) -> list[list[tuple[int, int]]]:
    """Of each token the first and the last but one key of the parts that the kernel reads for its first head, in the
    order in which they are merged."""
    width, _, total_at, tile, *columns, merge_at, output_at, chunk_at, _, _, mask_at, is_captured, splits = works.layout
    assert is_captured and splits
    starts, pages, last = (view.numpy() for view in works.bounds(torch.from_numpy(memory)))
    requests, tiles, chunks, merges, outputs = (memory[at // 4 :] for at in (*columns, merge_at, output_at))
    size, group, parts = int(memory[chunk_at // 4]), works._group, {}
    for block in range(width):
        if not memory.view(np.uint8)[mask_at + block]:
            continue
        row, chunk = int(requests[block]), int(chunks[block])
        num_keys = int((pages[row + 1] - pages[row] - 1) * PAGE + last[row])
        assert pages[row + 1] <= pages[-1], "or the kernel takes its pages for none"
        keys = chunk * size, min((chunk + 1) * size, num_keys)
        for packed in range(int(tiles[block]) * tile, (int(tiles[block]) + 1) * tile):
            token, head = divmod(packed, group)
            if token < starts[row + 1] - starts[row] and head == 0:
                place = int(outputs[row]) + token * -(-num_keys // size) + chunk
                assert place not in parts, "two blocks would write there"
                parts[place] = keys
    bounds = [int(merges[at]) for at in range(int(memory[total_at // 4]) + 1)]
    found = [[parts.pop(place) for place in range(*ends)] for ends in itertools.pairwise(bounds)]
    assert not parts, "all are merged"
    return found


@pytest.mark.parametrize(("num_tokens", "heads"), [(64, (32, 8, 128)), (128, (32, 8, 128)), (128, (8, 8, 256))])
def test_every_token_sees_each_of_its_keys_once(num_tokens, heads):
    works, rng = SplitList(num_tokens, heads, PAGE, 2 * 132, MOST_ROWS), np.random.default_rng(0)
    memory = np.full(works.num_bytes // 4, 7, dtype=np.int32)
    for _ in range(40):  # lists in the same place
        count = int(rng.integers(1, MOST_ROWS + 1))
        lengths = rng.integers(1, num_tokens // count + 1, count).astype(np.int32)
        keys = lengths + rng.choice([0, 1, 15, 16, 200, 1984, 6000], count).astype(np.int32)
        starts = np.array([0, *np.cumsum(lengths)], dtype=np.int32)
        pages = np.array([0, *np.cumsum(-(-keys // PAGE))], dtype=np.int32)
        assert works.write(memory, starts, pages, keys) == works.num_bytes
        of_tokens = read(works, memory)
        assert len(of_tokens) == starts[-1]
        for parts, num_keys in zip(of_tokens, np.repeat(keys, lengths).tolist(), strict=True):
            assert [0, *(end for _, end in parts)] == [*(start for start, _ in parts), num_keys]


def test_a_long_prefix_is_divided_among_all_blocks_of_a_head_and_a_short_one_is_not():
    works = SplitList(64, (32, 8, 128), PAGE, 2 * 132, MOST_ROWS)
    memory = np.zeros(works.num_bytes // 4, dtype=np.int32)

    def blocks(keys: int) -> int:
        pages = np.array([0, -(-keys // PAGE)], dtype=np.int32)
        assert works.write(memory, np.array([0, 16], dtype=np.int32), pages, np.array([keys], dtype=np.int32))
        mask = works.layout[12]
        return int(memory.view(np.uint8)[mask : mask + works.layout[0]].sum())

    assert works.layout[0] == 33 and [blocks(keys) for keys in (100, 128, 129, 2000)] == [1, 1, 2, 16]
    assert 25 < blocks(30_000) <= 33


def test_more_rows_or_tiles_than_it_has_room_for_are_not_written():
    works = SplitList(64, (32, 8, 128), PAGE, 24, MOST_ROWS)  # three pieces
    memory = np.full(works.num_bytes // 4, 7, dtype=np.int32)

    def written(*lengths: int) -> bool:
        starts = np.array([0, *np.cumsum(lengths)], dtype=np.int32)
        keys = np.array(lengths, dtype=np.int32)
        pages = np.array([0, *np.cumsum(-(-keys // PAGE))], dtype=np.int32)
        return bool(works.write(memory, starts, pages, keys))

    assert not written(*[1] * (MOST_ROWS + 1)) and not written(1, 1, 1, 1) and not written(64)
    assert (memory == 7).all()
    assert written(16, 16, 16)
