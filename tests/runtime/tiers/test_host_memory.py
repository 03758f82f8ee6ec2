"""Memory that a GPU copies from is registered part by part, with its pages there before."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

from mllm_compile.runtime.errors import DeviceError
from mllm_compile.runtime.tiers import host_memory
from mllm_compile.runtime.tiers.host_memory import HostMemory
from tests.hang_guard import HANG_S, until

CHUNKS = [8192, 8192, 4096]


class FakeDriver:
    """Notes calls; registers a part only when it may."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.may = threading.Semaphore(0)
        self.calls: list[tuple[str, int]] = []
        self.fails_at = fails_at
        self.base = 0

    def call(self, name: str, device: int, doing: str, address: Any, *arguments: Any) -> None:
        self.base = self.base or address.value
        start = address.value - self.base
        if name == "cuMemHostRegister_v2":
            self.may.acquire()
            if start == self.fails_at:
                raise DeviceError("no")
        self.calls.append((name, start))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeDriver:
    fake = FakeDriver(getattr(request, "param", None))
    monkeypatch.setattr("mllm_compile.runtime.tiers.host_memory.driver", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return fake


def test_a_copy_waits_for_its_own_part_alone_and_all_parts_are_given_back(driver: FakeDriver) -> None:
    memory = HostMemory(CHUNKS, torch.device("cuda"))
    waits = threading.Thread(target=memory.wait_until, args=(8193,))
    waits.start()
    driver.may.release()
    memory.wait_until(8192)
    assert waits.is_alive()
    driver.may.release()
    waits.join()
    driver.may.release()
    memory.wait_until(sum(CHUNKS))
    memory.close()
    starts = [0, 8192, 16384]
    assert driver.calls == [
        (name, start) for name in ("cuMemHostRegister_v2", "cuMemHostUnregister") for start in starts
    ]


@pytest.mark.parametrize("driver", [8192], indirect=True)
def test_a_part_that_is_refused_fails_who_waits_for_it_and_those_before_stay(driver: FakeDriver) -> None:
    memory = HostMemory(CHUNKS, torch.device("cuda"))
    driver.may.release(3)
    with pytest.raises(DeviceError):
        memory.wait_until(sum(CHUNKS))
    memory.wait_until(8192)
    memory.close()
    assert driver.calls == [("cuMemHostRegister_v2", 0), ("cuMemHostUnregister", 0)]


@pytest.mark.parametrize("driver", [0], indirect=True)
def test_who_waits_hears_of_a_refusal_while_further_pages_are_being_made(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def make(address: int, num_bytes: int) -> None:
        if num_bytes == CHUNKS[-1]:
            begins.set()
            may_end.wait(HANG_S)
            has_ended.set()

    monkeypatch.setattr(host_memory.host_pages, "make", make)
    memory = HostMemory(CHUNKS, torch.device("cuda"))
    until(begins.is_set)
    driver.may.release()
    with pytest.raises(DeviceError):
        memory.wait_until(8192)
    assert not has_ended.is_set()
    may_end.set()
    memory.close()
    assert not driver.calls


def test_the_driver_is_left_to_others_until_a_copy_waits(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    monkeypatch.setattr(host_memory, "_PAUSE", 1e8)  # longer than any test
    monkeypatch.setattr(host_memory, "_AHEAD", 1)
    monkeypatch.setattr(host_memory.host_pages, "make", lambda address, num_bytes: made.append(num_bytes))
    memory = HostMemory(CHUNKS, torch.device("cuda"))
    memory.step_s = math.inf  # steps run
    driver.may.release(3)
    memory.wait_until(8192)
    assert made == CHUNKS[:1]
    memory.wait_until(8193)
    assert made == CHUNKS[:2]
    memory.close()
    assert len(driver.calls) == 4, "the end does not wait for the pause"


def test_in_an_idle_engine_the_driver_is_not_left_to_anybody(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_PAUSE", 1e8)
    memory = HostMemory(CHUNKS, torch.device("cuda"))
    driver.may.release(3)
    until(lambda: memory.is_registered)  # nobody waits for it
    memory.close()


def test_what_loads_will_wait_for_is_registered_without_a_pause(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float | None]()
    wait_for = threading.Condition.wait_for

    def note(self: threading.Condition, goes_on: Any, timeout: float | None = None) -> bool:
        if timeout is not None and not goes_on():
            waits.append(timeout)
        return wait_for(self, goes_on, timeout)

    memory = HostMemory(CHUNKS, torch.device("cuda"))
    memory.hurry(sum(CHUNKS))
    monkeypatch.setattr(threading.Condition, "wait_for", note)
    driver.may.release(3)
    memory.wait_until(sum(CHUNKS))
    assert memory.is_registered
    assert not waits[:-1], "but behind the last part"
    memory.hurry(8192)
    memory.close()


def test_a_cpu_has_all_of_it_at_once() -> None:
    memory = HostMemory(CHUNKS, torch.device("cpu"))
    memory.wait_until(memory.num_bytes)
    assert memory.num_bytes == sum(CHUNKS)
    assert not memory.data.any()
    memory.close()
