"""The protocol of copied sums, played by streams that go on in any order: no rank reads missing or overwritten data,
and none waits for ever."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from mllm_compile.runtime.collectives import copied
from mllm_compile.runtime.collectives.copied import CopiedSums, copied_bytes

MOST = 1000  # bytes of a sum: not a multiple of what buffers are aligned to
CALLS = 9


class Device:
    """Memory by address, and a queue for each rank's stream; numbers stand for what is at an address."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.streams: dict[int, deque[Any]] = {}
        self.rank = 0  # whose stream is the current one
        self.read: list[tuple[int, list[int]]] = []  # rank, and what its kernel found of each rank

    def copy(self, to: int, source: int, num_bytes: int, *_: int) -> None:
        self._queue(lambda: self.memory.__setitem__(to, self.memory[source]))

    def write(self, address: int, word: int, *_: int) -> None:
        self._queue(lambda: self.memory.__setitem__(address, word))

    def wait(self, address: int, word: int, *_: int) -> None:
        self._queue(lambda: None, lambda: self.memory.get(address, 0) >= word)

    def launch(self, kernel: Any, x: torch.Tensor, arguments: Sequence[Any]) -> None:
        rank, parts = self.rank, arguments[5]
        places = [parts.at[source] for source in range(arguments[6].value)]
        self._queue(lambda: self.read.append((rank, [self.memory[place] for place in places])))

    def _queue(self, do: Any, may: Any = lambda: True) -> None:
        self.streams[self.rank].append((do, may))

    def run(self, order: random.Random) -> None:
        """Lets the streams go on by turns until all is done."""
        while any(self.streams.values()):
            ready = [stream for stream in self.streams.values() if stream and stream[0][1]()]
            assert ready, "all streams wait for each other"
            do, _ = order.choice(ready).popleft()
            do()


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device()
    monkeypatch.setattr(copied, "copy_bytes", device.copy)
    monkeypatch.setattr(copied, "write_word", device.write)
    monkeypatch.setattr(copied, "wait_for_word", device.wait)
    monkeypatch.setattr(copied, "launch_rows", device.launch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return device


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_every_rank_adds_the_parts_of_the_same_call(device, num_ranks, seed):
    size = copied_bytes(num_ranks, MOST)
    places = [1 << 60 | rank * size for rank in range(num_ranks)]
    ranks = [CopiedSums(rank, places, torch.device("cpu"), MOST) for rank in range(num_ranks)]
    residual, weight = torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    kept = []
    for rank, one in enumerate(ranks):
        device.rank, device.streams[rank] = rank, deque()
        for call in range(CALLS):
            x = torch.zeros(2, 8, dtype=torch.bfloat16)
            kept.append(x)  # an address is used once
            assert one.takes(x)
            device.memory[x.data_ptr()] = 100 * call + rank
            one.sum_and_norm(x, residual, weight, 1e-6)
    device.run(random.Random(seed))
    for rank in range(num_ranks):
        found = [parts for reader, parts in device.read if reader == rank]
        assert found == [[100 * call + source for source in range(num_ranks)] for call in range(CALLS)]


def test_buffers_and_words_of_a_rank_are_apart_and_in_its_memory(device):
    places = [0, 1 << 40, 1 << 50]
    one = CopiedSums(1, places, torch.device("cpu"), MOST)
    found = set()
    for _ in range(2):
        one._calls += 1
        found |= {one._buffer(1, source) for source in (0, 2)}
    words = {one._word(1, source) for source in (0, 2)}
    ends = [*sorted(found), min(words)]
    assert len(found) == 4
    assert all(later - earlier >= MOST for earlier, later in pairwise(ends))
    assert max(words) + ctypes.sizeof(ctypes.c_uint32) <= places[1] + copied_bytes(3, MOST)
