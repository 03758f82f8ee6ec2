"""Ranks that ask whether they see each other's GPUs: several in lockstep, each with its own numbers of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mllm_compile.runtime.collectives import gpu_numbers, nccl
from mllm_compile.runtime.collectives.base import current
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from mllm_compile.runtime.collectives.nccl import NcclCommunicator
from mllm_compile.runtime.collectives.sum_kernels import PushKernel

KERNELS = [PushKernel()]


class Rank(NcclCommunicator):
    """A rank whose calls go to the ranks in lockstep."""

    def __init__(self, index: int) -> None:
        self.rank, self.size = current().rank, current().size
        self._device = torch.device("cpu", index)  # stands for the GPU of that number
        self._pushed = self._sent = self._choice = None
        self._seen, self.shared = [], 0

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return current().all_gather(x)

    def _shared(self, num_bytes: int, word: int) -> list[int]:
        self.shared += 1
        return [0] * self.size


class Host:
    """The GPUs that each rank sees, by their UUIDs in its own order.

    Args:
        no_peers: pairs of UUIDs that have no way to each other.
        processes: each rank's numbers of processes.
    """

    def __init__(self, visible: Sequence[str], no_peers: Sequence[str] = (), processes: Sequence[str] = ()) -> None:
        self._visible, self._no_peers, self._processes = visible, no_peers, processes

    def device_count(self) -> int:
        return len(self._visible[current().rank])

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=self._visible[current().rank][index])

    def can_device_access_peer(self, own: int, other: int) -> bool:
        mine = self._visible[current().rank]
        assert own != other and max(own, other) < len(mine), "torch knows no such pair of GPUs"
        return mine[own] + mine[other] not in self._no_peers

    def readlink(self, path: str) -> str:
        return self._processes[current().rank] if self._processes else "pid:[1]"


def answers(monkeypatch: Any, host: Host, devices: Sequence[int], kernels: Sequence[Sequence[Any]] = ()) -> list[bool]:
    """Has each rank ask and share: which see all; either all have memory in common, or none."""
    for name in ("device_count", "get_device_properties", "can_device_access_peer"):
        monkeypatch.setattr(torch.cuda, name, getattr(host, name))
    monkeypatch.setattr(gpu_numbers, "os", SimpleNamespace(uname=gpu_numbers.os.uname, readlink=host.readlink))
    for name in ("PushedSums", "SentSums"):
        monkeypatch.setattr(nccl, name, lambda *arguments, **options: (arguments, options))

    def ask(rank: int) -> tuple[bool, int]:
        one = Rank(devices[rank])
        one.use_kernels(kernels[rank] if kernels else KERNELS)
        return one._sees_all(), one.shared

    told = run_lockstep(len(devices), ask)
    seen = [sees for sees, _ in told]
    have_kernels = all(PushKernel() in of_rank for of_rank in kernels)
    assert {bool(shared) for _, shared in told} == {all(seen) and have_kernels}
    return seen


@pytest.mark.parametrize("devices", [(0, 1), (0, 1, 2, 3), (2, 3), (3, 1)], ids=str)
def test_ranks_of_one_host_see_each_other(devices, monkeypatch):
    assert all(answers(monkeypatch, Host(["abcd"] * len(devices)), devices))


def test_ranks_that_count_gpus_otherwise_ask_for_each_other_s(monkeypatch):
    assert answers(monkeypatch, Host(["ab", "ba"]), (0, 0)) == [True, True]
    assert answers(monkeypatch, Host(["abc", "cb"], no_peers=["ac", "ca"]), (0, 0)) == [False, False]
    assert answers(monkeypatch, Host(["abc", "cb"], no_peers=["ac", "ca"]), (1, 0)) == [True, True]


@pytest.mark.parametrize("visible", [("a", "b"), ("abcd", "d")], ids=str)
def test_a_gpu_that_is_hidden_from_a_rank_is_not_seen(visible, monkeypatch):
    host = Host(visible)
    assert not all(answers(monkeypatch, host, (0, len(visible[1]) - 1)))


def test_one_way_that_lacks_keeps_all_from_sharing(monkeypatch):
    seen = answers(monkeypatch, Host(["abcd"] * 4, no_peers=["bd"]), (0, 1, 2, 3))
    assert seen == [True, False, True, True]


def test_containers_of_one_host_do_not_open_each_other_s_memory(monkeypatch):
    host = Host(["ab", "ab"], processes=["pid:[1]", "pid:[2]"])
    assert answers(monkeypatch, host, (0, 1)) == [False, False]


def test_ranks_agree_where_one_has_no_kernels(monkeypatch):
    host = Host(["ab", "ab"])
    assert answers(monkeypatch, host, (0, 1), kernels=[KERNELS, ()]) == [True, True]
    assert answers(monkeypatch, host, (0, 1), kernels=[(), ()]) == [True, True]
