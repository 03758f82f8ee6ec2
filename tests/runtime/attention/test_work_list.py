"""The list of work of few prompts, against FlashInfer's plan written out (PrefillSM90Plan, 0.6.18)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.attention.flashinfer.work_list import WorkList

HEADS, BLOCKS = 4, 24
LENGTHS = st.lists(st.sampled_from([0, 0, 0, 1, 127, 128, 129, 192, 193, 500]), min_size=9, max_size=9)
# Offsets in bytes with room for 40 pieces, as the plan aligns them; the bounds before the requests.
LAYOUT = [0, 160, 320, 480, 640, 800, 960, 1072, False]


def expected(starts: list[int], pages: list[int], keys: list[int], queries: int) -> set[tuple[int, ...]]:
    pieces = set()
    for head in range(HEADS):
        for request, num_keys in enumerate(keys):
            length = starts[request + 1] - starts[request]
            for tile in range(-(-length // queries)):
                pieces.add((tile, starts[request], pages[request], length, num_keys, head, request))
    return pieces


def read(memory: np.ndarray) -> list[list[tuple[int, ...]]]:
    """The pieces of each block as the kernel reads them."""
    *columns, bounds, requests = (memory[offset // 4 :] for offset in LAYOUT[:8])
    return [
        [tuple(int(column[at]) for column in (*columns, requests)) for at in range(bounds[block], bounds[block + 1])]
        for block in range(BLOCKS)
    ]


@pytest.mark.parametrize(("head_dim", "queries"), [(128, 128), (64, 192), (256, 128)])
@given(data=st.data())
def test_every_tile_of_every_head_is_one_block_s(head_dim, queries, data):
    memory = np.full(400, -9, dtype=np.int32)
    works = WorkList(LAYOUT, HEADS, head_dim, BLOCKS)
    for _ in range(3):  # lists in the same place
        lengths = data.draw(
            st.lists(st.sampled_from([0, 0, 0, 1, 127, 128, 129, 192, 193, 500]), min_size=9, max_size=9)
        )
        starts = [data.draw(st.integers(0, 9))]
        for length in lengths:
            starts.append(starts[-1] + length)
        keys = [length + data.draw(st.integers(0, 99)) for length in lengths]
        pages = [50 * row for row in range(10)]
        given_arrays = (np.array(values, dtype=np.int32) for values in (starts, pages, keys))
        before = memory.copy()
        num_bytes = works.write(memory, *given_arrays)
        wanted = expected(starts, pages, keys, queries)
        if len(wanted) > BLOCKS:
            assert num_bytes == 0 and np.array_equal(memory, before)
            continue
        blocks = read(memory)
        assert max(map(len, blocks)) <= 1
        found = [piece for block in blocks for piece in block]
        assert len(found) == len(wanted) and set(found) == wanted
        assert num_bytes == max(1072 + 4 * len(wanted), 960 + 4 * (BLOCKS + 1))
