"""Messages between ranks: a rank that follows copies what rank 0 copies, and ends where it cannot."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile.runtime.errors import DeviceError
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.tiers.names import RANKS_BEGIN
from mllm_compile.runtime.tiers.ranked import FollowedCopies, RankedCopies, layouts_of


def runner() -> Any:
    pool = SimpleNamespace(tensors=[torch.randn(6, 4, 2), torch.randn(6, 8)])
    states = SimpleNamespace(tensors=[torch.randn(3, 5)])
    found = SimpleNamespace(token_to_kv_pool=pool, state_pool=states, drafters=[], device=torch.device("cpu"))
    found.on_device = nullcontext
    return found


def entries(*slots: int) -> list[Entry]:
    return [Entry(bytes([slot]), b"", b"", 4, slot) for slot in slots]


class Ranks:
    """Rank 0 and one that follows, which takes messages when it is told to."""

    def __init__(self) -> None:
        self.own, self.other = runner(), runner()
        self.messages: list[bytearray] = []
        self.followed = FollowedCopies(self.other)
        self.copies = RankedCopies(self._tell, layouts_of(self.own, True), (4, 2), torch.device("cpu"))

    def _tell(self, parts: Any) -> None:
        self.messages.append(bytearray(b"".join(parts)))

    def begin(self, ticket: Ticket) -> None:
        self.copies.begin(ticket)
        self.copies.wait()
        self.copies.finished()

    def follow(self) -> None:
        for message in self.messages:
            assert message.startswith(RANKS_BEGIN)
            self.followed.take(message)
        self.messages.clear()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_a_rank_that_follows_has_its_part_of_pages_and_states_behind_a_load(ranks: Ranks) -> None:
    both = ranks.own, ranks.other
    kept = [[one.clone() for one in rank.token_to_kv_pool.tensors] for rank in both]
    states = [rank.state_pool.tensors[0].clone() for rank in both]
    ranks.begin(Ticket("store", entries(2, 0), np.array([5, 1], dtype=np.int32)))
    ranks.begin(Ticket("store", entries(1), np.array([2], dtype=np.int32), is_state=True))
    ranks.follow()
    for rank in both:
        for tensor in (*rank.token_to_kv_pool.tensors, *rank.state_pool.tensors):
            tensor.zero_()
    pages = np.array([3, 4], dtype=np.int32)
    ranks.begin(Ticket("load", entries(0, 2), pages, from_below=np.zeros(2, dtype=bool)))
    row = np.array([0], dtype=np.int32)
    ranks.begin(Ticket("load", entries(1), row, is_state=True, from_below=np.zeros(1, dtype=bool)))
    ranks.follow()
    for rank, tensors, state in zip(both, kept, states, strict=True):
        for now, before in zip(rank.token_to_kv_pool.tensors, tensors, strict=True):
            assert torch.equal(now[[3, 4]], before[[1, 5]])
            assert not now[[0, 1, 2, 5]].any()
        assert torch.equal(rank.state_pool.tensors[0][0], state[2])


def test_a_copy_that_fails_there_ends_the_rank(ranks: Ranks) -> None:
    ranks.other.token_to_kv_pool.tensors = [torch.randn(2, 4, 2), torch.randn(2, 8)]  # its page 5 is not there
    ranks.copies.begin(Ticket("store", entries(0), np.array([5], dtype=np.int32)))
    ranks.copies.wait()
    ranks.copies.finished()
    with pytest.raises(DeviceError, match="kv_offloading_size has failed"):
        ranks.follow()
