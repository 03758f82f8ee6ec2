"""Messages between ranks: a rank that follows copies what rank 0 copies, and ends where it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile.runtime.errors import DeviceError
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.tiers import ranked as module
from mllm_compile.runtime.tiers.connector import Namespace
from mllm_compile.runtime.tiers.disk import DiskFiles
from mllm_compile.runtime.tiers.names import RANKS_BEGIN
from mllm_compile.runtime.tiers.ranked import FollowedCopies, RankedCopies, layouts_of, share_slots
from mllm_compile.runtime.tiers.shared_slots import FollowedSlots


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


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Two ranks with files below; the other one takes messages at once."""
    monkeypatch.setattr(module, "sums_of", lambda runner: [{"weight": 7}])
    own, other = runner(), runner()
    followed, layouts = FollowedCopies(other), layouts_of(own, True)

    def tell(parts: Any) -> None:
        followed.take(bytearray(b"".join(parts)))

    shared = share_slots(tell, layouts, (4, 2), num_others=1)
    sizes = (2 * layout.slot_bytes for layout in layouts)
    files = DiskFiles(tmp_path, Namespace.of({"sums": shared.sums[0].hex()}, *sizes))
    copies = RankedCopies(tell, layouts, (4, 2), torch.device("cpu"), files, shared)
    yield SimpleNamespace(ranks=(own, other), copies=copies, folder=files.folder, followed=followed)
    copies.close()


def done(copies: RankedCopies, ticket: Ticket) -> Ticket:
    copies.begin(ticket)
    while not (over := copies.finished()):
        copies.wait()
    assert over == [ticket]
    return ticket


def pages_of(ranks: Any) -> list[torch.Tensor]:
    return [tensor for rank in ranks for tensor in rank.token_to_kv_pool.tensors]


def whole(*slots: int) -> list[Entry]:
    return [Entry(bytes([slot]) * 16, b"", b"f" * 16, 4, slot) for slot in slots]


def test_a_value_below_is_of_all_ranks_and_a_lost_one_is_lost_for_all(on_disk: SimpleNamespace) -> None:
    copies, ranks = on_disk.copies, on_disk.ranks
    kept = [tensor.clone() for tensor in pages_of(ranks)]
    state = [rank.state_pool.tensors[0].clone() for rank in ranks]
    done(copies, Ticket("store", whole(0, 1), np.array([2, 3], dtype=np.int32)))
    done(copies, Ticket("store", whole(1), np.array([2], dtype=np.int32), is_state=True))
    assert not done(copies, Ticket("write", whole(0, 1))).failed.any()
    assert not done(copies, Ticket("write", whole(1), is_state=True)).failed.any()
    done(copies, Ticket("store", whole(0, 1), np.array([4, 5], dtype=np.int32)))  # others get their slots
    for tensor in (*pages_of(ranks), *(rank.state_pool.tensors[0] for rank in ranks)):
        tensor.zero_()
    below = np.ones(2, dtype=bool)
    entries = [Entry(one.key, b"", one.first, 4, slot) for one, slot in zip(whole(0, 1), (3, 2), strict=True)]
    load = done(copies, Ticket("load", entries, np.array([1, 5], dtype=np.int32), from_below=below))
    assert not load.failed.any()
    row = np.array([0], dtype=np.int32)
    done(copies, Ticket("load", whole(1), row, is_state=True, from_below=below[:1]))
    for now, before in zip(pages_of(ranks), kept, strict=True):
        assert torch.equal(now[[1, 5]], before[[2, 3]])
    assert all(torch.equal(rank.state_pool.tensors[0][0], before[2]) for rank, before in zip(ranks, state, strict=True))
    (path,) = (one for one in on_disk.folder.rglob("*p") if one.name.startswith("00"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the other rank's part
    path.write_bytes(data)
    load = done(copies, Ticket("load", entries, np.array([1, 5], dtype=np.int32), from_below=below))
    assert load.failed.tolist() == [True, False]


def test_nothing_is_written_of_a_page_that_another_rank_has_not_stored(
    on_disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mllm_compile.runtime.tiers.shared_slots._WAIT_S", 0.2)
    monkeypatch.setattr(FollowedSlots, "done", lambda *_: None)
    copies = on_disk.copies
    done(copies, Ticket("store", whole(0), np.array([2], dtype=np.int32)))
    assert done(copies, Ticket("write", whole(0))).failed.all()
    assert not list(on_disk.folder.rglob("*p"))


def test_a_copy_that_fails_there_ends_the_rank(ranks: Ranks) -> None:
    ranks.other.token_to_kv_pool.tensors = [torch.randn(2, 4, 2), torch.randn(2, 8)]  # its page 5 is not there
    ranks.copies.begin(Ticket("store", entries(0), np.array([5], dtype=np.int32)))
    ranks.copies.wait()
    ranks.copies.finished()
    with pytest.raises(DeviceError, match="kv_offloading_size has failed"):
        ranks.follow()
