"""Fixtures of the runtime's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from mllm_compile.runtime.cuda.driver import _context
from mllm_compile.runtime.cuda_graph.verifies import VerifyGraphs
from tests.runtime.cuda_graph.played_cases import play_graphs
from tests.runtime.fake_driver import FakeDriver


@pytest.fixture
def driver(monkeypatch) -> Iterator[Callable[..., FakeDriver]]:
    """Puts a fake driver in the place of the machine's; one of its calls may fail."""

    def use(fails: str = "") -> FakeDriver:
        fake = FakeDriver(fails)
        for name in ("_driver", "_driver_within_the_lock"):
            monkeypatch.setattr(f"mllm_compile.runtime.cuda.driver.{name}", lambda: fake)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        return fake

    _context.cache_clear()
    yield use
    _context.cache_clear()


@pytest.fixture
def played(monkeypatch) -> None:
    """Graphs of played_runner, on a CPU."""
    play_graphs(monkeypatch)


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """The requests of each step of drafts that is one launch."""
    found, launch = [], VerifyGraphs.launch
    monkeypatch.setattr(VerifyGraphs, "launch", lambda *of: found.append(len(of[1])) or launch(*of))
    return found
