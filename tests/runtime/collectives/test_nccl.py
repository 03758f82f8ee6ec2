"""What ranks over NCCL agree on, without a GPU."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.collectives import nccl
from mllm_compile.runtime.collectives.nccl import NcclCommunicator
from mllm_compile.runtime.collectives.sum_kernels import ChooseKernel


class Rank(NcclCommunicator):
    """One of two, whose calls are noted: the other answers as `answers` say, in order."""

    def __init__(self, answers: list[bool]) -> None:
        self.rank, self.size = 0, 2
        self._device = torch.device("cuda", 0)
        self._pushed = self._sent = self._choice = None
        self._answers, self.calls = answers, []

    def least(self, value: int) -> int:
        self.calls.append("least")
        return min(value, self._answers.pop(0))

    def _shared(self, num_bytes: int, word: int) -> list[int]:
        self.calls.append("shared")
        return [0, 0]

    def _sees_all(self) -> bool:
        return True


@pytest.mark.parametrize("has_other", [False, True])
def test_ranks_choose_by_a_kernel_where_all_have_one(monkeypatch, has_other):
    monkeypatch.setattr(nccl, "is_loaded", lambda kernel, device: True)
    monkeypatch.setattr(nccl, "has_any", lambda kind, device: kind is ChooseKernel)  # perhaps of an earlier model
    for name in ("PushedSums", "SentSums", "TokenChoice"):
        monkeypatch.setattr(nccl, name, lambda *arguments: arguments)
    rank = Rank([True, has_other])
    rank.use_kernels()
    assert rank.calls == ["least", "shared", "shared", "least", *(["shared"] if has_other else [])]
    assert (rank.choice(40) is not None) == has_other
