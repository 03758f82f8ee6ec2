"""Agreement of ranks over NCCL, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mllm_compile.runtime.collectives import nccl, push
from mllm_compile.runtime.collectives.base import add_and_norm
from mllm_compile.runtime.collectives.lanes import Lane
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
        monkeypatch.setattr(nccl, name, lambda *arguments: arguments)


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
