"""Agreement of ranks over NCCL, without a GPU, and the order of their sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mllm_compile.runtime.collectives import nccl, push
from mllm_compile.runtime.collectives.base import add_and_norm, current, sum_by_gather
from mllm_compile.runtime.collectives.gloo import GlooCommunicator
from mllm_compile.runtime.collectives.lanes import Lane
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from mllm_compile.runtime.collectives.nccl import NcclCommunicator
from mllm_compile.runtime.collectives.sum_kernels import AddNormKernel, ChooseKernel, PushKernel, PushNormKernel


class Rank(NcclCommunicator):
    """One of two, whose calls are noted: the other answers as `answers` say, in order, and has zeros."""

    def __init__(self, *answers: bool) -> None:
        self.rank, self.size = 0, 2
        self._device = torch.device("cuda", 0)
        self._pushed = self._sent = self._choice = None
        self._answers, self.calls = [*answers], []

    def least(self, value: int) -> int:
        self.calls.append("least")
        return min(value, self._answers.pop(0))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def _shared(self, num_bytes: int, word: int) -> list[int]:
        self.calls.append("shared")
        return [0, 0]

    def _sees_all(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def of_an_earlier_model(monkeypatch) -> None:
    """This process has kernels of a runtime that it served before; the other ranks' are new."""
    for kernel in (PushKernel(), PushNormKernel(16), AddNormKernel(16), ChooseKernel(48)):
        monkeypatch.setitem(push._LOADED, (0, kernel), object())
    for name in ("PushedSums", "SentSums", "TokenChoice"):
        monkeypatch.setattr(nccl, name, lambda *arguments, **options: (arguments, options))


@pytest.mark.parametrize("chooses", [False, True])
def test_ranks_choose_by_the_kernels_of_their_runtime_alone(chooses):
    rank = Rank(True)
    rank.use_kernels([PushKernel(), *([ChooseKernel(40)] if chooses else [])])
    assert rank.calls == ["least", "shared", "shared", *(["shared"] if chooses else [])]
    assert (rank.choice(40) is not None) == chooses
    assert rank.choice(48) is None


@pytest.mark.parametrize(("kernels", "other"), [((), True), ((PushKernel(),), False)])
def test_ranks_have_no_sums_of_their_own_where_one_cannot(kernels, other):
    rank = Rank(other)
    rank.use_kernels(kernels)
    assert rank.calls == ["least"]


def test_sums_are_normed_by_the_kernels_of_the_runtime_alone(monkeypatch):
    x, residual, weight = torch.randn(2, 16), torch.randn(2, 16), torch.randn(16)
    monkeypatch.setattr(nccl, "add_and_norm", lambda *arguments: "by a kernel")
    rank = Rank(False, False)
    rank.use_kernels([])
    found: Any = rank.all_reduce_residual_norm(x, residual, weight, 1e-6)
    wanted = add_and_norm(x, residual, weight, 1e-6)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    rank.use_kernels([PushNormKernel(16)])
    assert rank.all_reduce_residual_norm(x, residual, weight, 1e-6) == "by a kernel"


@pytest.mark.parametrize("kernels", [(), (AddNormKernel(16),)])
def test_parts_of_a_step_are_copied_where_the_runtime_norms_them(kernels):
    class Copied:
        def takes(self, x: torch.Tensor) -> bool:
            return True

        def sum_and_norm(self, *arguments: Any) -> str:
            return "copied"

    def in_order(call: Any, *arguments: Any) -> str:
        return "in order"

    lane = Lane(Rank(), in_order, Copied(), kernels)  # type: ignore[arg-type]
    x = torch.zeros(2, 16)
    assert lane.all_reduce_residual_norm(x, x, x[0], 1e-6) == ("copied" if kernels else "in order")


class InParts(push.PushedSums):
    """Sums of three ranks that have the same numbers, at most 16 bytes at a time."""

    def __init__(self, takes_all: bool) -> None:
        self._most_bytes, self._takes_all, self._most_blocks = 16, takes_all, 1
        self._most_chunks, self.parts = None, []

    _group = ()

    def _push(self, x: torch.Tensor, total: torch.Tensor) -> None:
        self.parts.append(x.nbytes)
        total.copy_(3 * x)


def test_sums_in_one_order_go_in_parts_of_what_kernels_take(monkeypatch):
    def add(kernel: Any, tensors: Any, eps: float, *rest: Any) -> None:
        x, residual, weight, summed, normed = tensors
        sums.parts.append(x.nbytes)
        for out, found in zip((summed, normed), add_and_norm(3 * x, residual, weight, eps), strict=True):
            out.copy_(found)

    monkeypatch.setattr(push, "_launch_norm", add)
    x, residual, weight = (torch.randn(shape).bfloat16() for shape in ((5, 8), (5, 8), (8,)))
    assert not InParts(False).takes(x)
    sums = InParts(True)
    assert sums.takes(x) and torch.equal(sums.sum(x), 3 * x) and sums.parts == [16] * 5
    found = sums.sum_and_norm(x, residual, weight, 1e-6)
    assert all(torch.equal(*both) for both in zip(found, add_and_norm(3 * x, residual, weight, 1e-6), strict=True))
    assert sums.parts == [16] * 10


@pytest.mark.parametrize(("size", "asked", "expected"), [(3, True, True), (3, False, False), (2, True, False)])
def test_more_than_two_ranks_without_kernels_add_what_they_gather(size, asked, expected):
    class Gathering(Rank):
        all_reduce = NcclCommunicator.all_reduce

        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x] * self.size)

        def _open(self) -> Any:
            raise LookupError("NCCL is called")

    rank = Gathering(False)
    rank.size = size
    rank.use_kernels([], in_one_order=asked)
    if expected:
        assert torch.equal(rank.all_reduce(torch.ones(4)), torch.full((4,), float(size)))
    else:
        with pytest.raises(LookupError):
            rank.all_reduce(torch.ones(4))


def test_a_number_s_sum_in_the_order_of_ranks_goes_by_no_place():
    def sums(rank: int) -> list[torch.Tensor]:
        x = torch.randn(300, generator=torch.Generator().manual_seed(rank)).bfloat16()
        return [sum_by_gather(current(), part) for part in (x, x[7:8], x[200:].contiguous())]

    for whole, one, rest in run_lockstep(5, sums):
        assert torch.equal(whole[7:8], one) and torch.equal(whole[200:], rest)


def test_a_group_over_gloo_sums_so_where_it_is_asked_to():
    group = object.__new__(GlooCommunicator)
    group.rank, group.size = 0, 3
    group.all_gather = lambda x: torch.stack([x, 2 * x, 3 * x])  # type: ignore[method-assign]
    group.use_kernels([], in_one_order=True)
    assert group.all_reduce(torch.ones(2)).tolist() == [6.0, 6.0]
