"""Copies of pages and states between a GPU and the host's memory give the bits that were there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.tiers.copies import SlotCopies
from mllm_compile.runtime.tiers.layout import SlotLayout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PAGES = 60


def entries(slots: np.ndarray) -> list[Entry]:
    return [Entry(int(slot).to_bytes(4, "big"), b"", b"", 4, int(slot)) for slot in slots]


@pytest.mark.parametrize("shape", [(64, 8, 128), (64, 1, 576), (3,)], ids=str)
def test_pages_and_states_in_any_order_come_back_as_they_were(shape: tuple[int, ...]) -> None:
    chance = np.random.default_rng(0)
    device = torch.device("cuda")
    pool = [torch.randn(PAGES, *shape, device=device).to(torch.bfloat16) for _ in range(6)]
    states = [torch.randn(5, 16, 8, device=device) for _ in range(3)]
    kept, kept_states = [one.clone() for one in pool], [one.clone() for one in states]
    copies = SlotCopies(SlotLayout(pool), SlotLayout(states), PAGES, 4, device)
    rows, slots, targets = (chance.permutation(PAGES) for _ in range(3))
    for start in range(0, PAGES, 7):
        part = slice(start, start + 7)
        copies.begin(Ticket("store", entries(slots[part]), rows[part].astype(np.int32)))
    copies.begin(Ticket("store", entries(np.array([2, 0])), np.array([4, 1], dtype=np.int32), is_state=True))
    copies.wait()
    for one in (*pool, *states):
        one.zero_()
    for start in range(0, PAGES, 11):
        part = slice(start, start + 11)
        from_below = np.zeros(rows[part].size, dtype=bool)
        copies.begin(Ticket("load", entries(slots[part]), targets[part].astype(np.int32), from_below=from_below))
    states_back = np.array([3, 0], dtype=np.int32)
    copies.begin(Ticket("load", entries(np.array([2, 0])), states_back, is_state=True, from_below=np.zeros(2, bool)))
    copies.wait()
    over = copies.finished()
    assert not any(ticket.failed.any() for ticket in over)
    for one, before in zip(pool, kept, strict=True):
        assert torch.equal(one[torch.from_numpy(targets).to(device)], before[torch.from_numpy(rows).to(device)])
    for one, before in zip(states, kept_states, strict=True):
        assert torch.equal(one[[3, 0]], before[[4, 1]])
    copies.close()
