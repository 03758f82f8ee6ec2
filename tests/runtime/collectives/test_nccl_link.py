"""The ways of a pipeline over NCCL, without a GPU: all are connected when the ranks have met."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mllm_compile.runtime.collectives import nccl
from mllm_compile.runtime.collectives.base import current
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from mllm_compile.runtime.collectives.nccl import NcclLink
from mllm_compile.runtime.collectives.stages import StagedCommunicator
from tests.hang_guard import HANG_S


class Nccl:
    """NCCL as its first calls are: each end waits in its own for the other's."""

    def __init__(self) -> None:
        self._pairs: dict[str, threading.Barrier] = defaultdict(lambda: threading.Barrier(2))
        self._lock = threading.Lock()
        self.sent, self.received = Counter[str](), Counter[str]()

    def ncclSend(self, place: int, size: int, kind: int, other: int, pair: str, stream: int) -> int:
        assert other == 1, "values go from the first rank to the second"
        return self._meet(self.sent, pair)

    def ncclRecv(self, place: int, size: int, kind: int, other: int, pair: str, stream: int) -> int:
        assert other == 0
        return self._meet(self.received, pair)

    def _meet(self, count: Counter[str], pair: str) -> int:
        with self._lock:
            count[pair] += 1
            met = self._pairs[pair]
        met.wait(HANG_S)
        return 0


class Group:
    """A group of ranks in lockstep, which makes parts."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size

    def part(self, name: str, ranks: Sequence[int]) -> Group | None:
        current().all_gather(torch.zeros(1))  # all call it
        return Group(name, list(ranks).index(self.rank), len(ranks)) if self.rank in ranks else None

    def link(self) -> NcclLink:
        return NcclLink(self, torch.device("cpu"))  # type: ignore[arg-type]

    def _open(self) -> str:
        return self.name

    def _stream(self) -> int:
        return 0


@pytest.mark.parametrize(("size", "num_stages"), [(2, 2), (4, 2), (4, 4), (6, 3)])
def test_ranks_connect_each_way_as_they_meet_and_wait_for_each_other_in_one_order(size, num_stages, monkeypatch):
    library = Nccl()
    stream = SimpleNamespace(wait_stream=lambda _: None, cuda_stream=0, device=None, record_event=lambda: None)
    monkeypatch.setattr(nccl, "library", lambda: library)
    for name, value in (("Stream", stream), ("current_stream", stream), ("synchronize", None)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)

    def join(rank: int) -> Any:
        whole: Any = Group("whole", rank, size)
        made = StagedCommunicator(whole, num_stages)
        return made.before is not None, made.behind is not None, sorted(made.tokens)

    told = run_lockstep(size, join)
    width = size // num_stages
    ways = [f"values {rank}" for rank in range(width, size)] + [f"tokens {rank}" for rank in range(1, size)]
    assert library.sent == library.received == Counter(ways), "each way has met once"
    assert [before for before, _, _ in told] == [rank < size - width for rank in range(size)]
    assert [behind for _, behind, _ in told] == [rank >= width for rank in range(size)]
    assert [tokens for _, _, tokens in told] == [[*range(1, size)]] + [[rank] for rank in range(1, size)]
