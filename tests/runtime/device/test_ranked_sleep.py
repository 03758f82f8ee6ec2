"""Sleep over ranks, each in this process: one that finds too little memory is an error, and not the end of all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from mllm_compile.errors import DeviceMemoryError
from mllm_compile.runtime.device import memory
from mllm_compile.runtime.device.ranked_sleep import FollowedSleep, RankedMemory, is_sleep
from mllm_compile.runtime.device.sleep import MEMORY_TAGS, SleepingMemory
from tests.sleeping_arena import Machine


class Rank:
    """One rank's memory, on a machine of its own."""

    def __init__(self) -> None:
        self.machine = Machine()
        weights, kv_cache = self.machine.arena(), self.machine.arena()
        (self.weight,) = weights.zeros([((64,), torch.float64)])
        (self.cache,) = kv_cache.zeros([((64,), torch.float64)])
        self.memory = SleepingMemory(torch.device("cpu"), weights, [], [kv_cache])


def over(own: Rank, follower: Rank, num_local: int = 1) -> RankedMemory:
    votes = list[int]()
    followed = FollowedSleep(follower.memory, votes.append)

    def send(parts: Iterable[memoryview]) -> None:
        message = bytearray(b"".join(parts))
        assert is_sleep(message)
        followed.take(message)

    def agree(parts: Iterable[memoryview]) -> bool:
        send(parts)
        return bool(votes.pop())

    return RankedMemory(own.memory, num_local, send, send, lambda: None, agree, agree)


def test_all_ranks_sleep_and_wake():
    ranks = Rank(), Rank()
    memory = over(*ranks)
    for number, rank in enumerate(ranks):
        rank.weight += number + 1
        rank.cache += 5
    memory.prepare(MEMORY_TAGS, saves=True)
    memory.sleep(MEMORY_TAGS, 0)
    assert [rank.machine.taken for rank in ranks] == [0, 0]
    memory.wake(MEMORY_TAGS)
    assert [set(rank.weight.tolist()) for rank in ranks] == [{1.0}, {2.0}]
    assert not any(rank.cache.any() for rank in ranks)


@pytest.mark.parametrize("full", [0, 1])
def test_a_rank_without_room_leaves_all_asleep(full):
    ranks = Rank(), Rank()
    memory = over(*ranks)
    for rank in ranks:
        rank.weight += 3
    memory.prepare(MEMORY_TAGS, saves=True)
    memory.sleep(MEMORY_TAGS, 0)
    size, ranks[full].machine.size = ranks[full].machine.size, 1
    for tag in MEMORY_TAGS:
        with pytest.raises(DeviceMemoryError):
            memory.wake([tag])
    assert [rank.machine.taken for rank in ranks] == [0, 0]
    ranks[full].machine.size = size
    memory.wake(MEMORY_TAGS)
    assert [set(rank.weight.tolist()) for rank in ranks] == [{3.0}] * 2


@pytest.mark.parametrize("full", [0, 1])
def test_a_host_without_room_is_told(full):
    ranks = Rank(), Rank()
    memory = over(*ranks)
    ranks[full].machine.is_host_full = True
    with pytest.raises(DeviceMemoryError):
        memory.prepare(MEMORY_TAGS, saves=True)
    ranks[full].machine.is_host_full = False
    memory.prepare(MEMORY_TAGS, saves=True)
    memory.sleep(MEMORY_TAGS, 0)
    memory.wake(MEMORY_TAGS)
    assert not any(rank.weight.any() for rank in ranks)


def test_ranks_of_one_host_need_room_for_all_of_them_before_one_takes_any(monkeypatch):
    ranks = Rank(), Rank()
    needed = sum(rank.memory.num_bytes["weights"] for rank in ranks)
    free = [needed - 1]
    monkeypatch.setattr(memory, "memory_bytes", lambda device: (free[0], needed))
    apart, together = over(*ranks), over(*ranks, num_local=2)
    with pytest.raises(DeviceMemoryError, match="2 ranks' copies need"):
        together.prepare(MEMORY_TAGS, saves=True)
    assert [rank.memory.host_bytes for rank in ranks] == [0, 0]
    together.prepare(MEMORY_TAGS, saves=False)
    assert together.host_bytes == 0, "weights that come anew are not copied"
    apart.prepare(MEMORY_TAGS, saves=True)
    free[0] = 0
    together.prepare(MEMORY_TAGS, saves=True)  # whose copies are there
    assert sum(rank.memory.host_bytes for rank in ranks) == needed
