"""Pages over NIXL, which reads the other end's memory by UCX: over shared memory and TCP, as there is no RDMA here."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mllm_compile.config.schema_runtime import KVTransferConfig
from mllm_compile.errors import ConfigError
from mllm_compile.kv_connectors.installed import check_installed
from mllm_compile.kv_connectors.peers import nixl
from mllm_compile.kv_connectors.peers.meeting import deadline
from mllm_compile.kv_connectors.peers.nixl import BusyError, Lent, NixlLender, NixlReader
from tests.hang_guard import HANG_S, until
from tests.kv_connectors.peers import test_peers
from tests.kv_connectors.peers.test_peers import KEYS, NUM_PAGES, PAGE_BYTES, fetched, num_right, prefill, store

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the extra nixl")
ROOT = Path(__file__).parents[3]
OTHER = """
import sys
import numpy as np
from mllm_compile.kv_connectors.peers.nixl import NixlLender
memory = np.arange(int(sys.argv[1]), dtype=np.int64).astype(np.uint8)
lender = NixlLender(memory)
print(*lender.lent, flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process(num_bytes: int, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Lent]]:
    """A process that lends memory whose bytes count."""
    command = [sys.executable, "-c", OTHER, str(num_bytes)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, **pipes)  # type: ignore[call-overload]
    try:
        assert process.stdout is not None
        agent, address = next(line for line in process.stdout if len(line.split()) == 2).split()
        yield process, Lent(agent, int(address))
    finally:
        with suppress(OSError):
            process.stdin.close()
        process.kill()
        process.wait()


class StandInLender:
    """A NixlLender for the same process."""

    def __init__(self, memory: np.ndarray) -> None:
        self.lent = Lent("itself", int(memory.ctypes.data))

    def close(self) -> None:
        pass


class StandInReader:
    """A NixlReader that is busy once."""

    def __init__(self) -> None:
        self.is_busy = True

    def read(self, lent: Lent, values: Sequence[tuple[int, memoryview]], until: float) -> None:
        is_busy, self.is_busy = self.is_busy, False
        if is_busy:
            raise BusyError
        for offset, buffer in values:
            buffer[:] = ctypes.string_at(lent.address + offset, len(buffer))

    def close(self) -> None:
        pass


@pytest.fixture
def reader() -> Iterator[NixlReader]:
    made = NixlReader(PAGE_BYTES)
    yield made
    made.close()


def expected(offset: int, size: int) -> np.ndarray:
    return np.arange(offset, offset + size, dtype=np.int64).astype(np.uint8)


@needs_nixl
@pytest.mark.parametrize("ways", [pytest.param("all", marks=pytest.mark.slow), "tcp"])
def test_values_of_another_process_are_read_in_parts_and_by_several_threads(ways, monkeypatch):
    monkeypatch.setenv("UCX_TLS", ways)
    monkeypatch.setattr(nixl, "_STAGED", 50_000)
    reader = NixlReader(40_000)
    with other_process(1_000_000) as (_, lent):
        sizes = [(100_000 * number + 7 * number, 4_000 * number) for number in range(1, 9)]
        found = [[np.zeros(size, np.uint8) for _, size in sizes] for _ in range(3)]

        def read(buffers: list[np.ndarray]) -> None:
            places = [(offset, one.data) for (offset, _), one in zip(sizes, buffers, strict=True)]
            reader.read(lent, places, deadline(HANG_S))

        threads = [threading.Thread(target=read, args=(one,)) for one in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for buffers in found:
            for (offset, size), one in zip(sizes, buffers, strict=True):
                assert np.array_equal(one, expected(offset, size))
    reader.close()


@needs_nixl
def test_what_was_not_lent_and_who_is_gone_are_errors_and_the_next_engine_is_read(reader):
    into = np.zeros(100, np.uint8)
    with other_process(1_000_000) as (process, lent):
        with pytest.raises(OSError, match="NIXL has read nothing"):
            reader.read(lent, [(2_000_000, into.data)], deadline(HANG_S))
        with pytest.raises(OSError, match="NIXL does not know the other end"):
            reader.read(Lent("bm9ib2R5", 0), [(0, into.data)], deadline(HANG_S))
        reader.read(lent, [(5, into.data)], deadline(HANG_S))
        assert np.array_equal(into, expected(5, 100))
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(OSError):
            reader.read(lent, [(900, into.data)], deadline(0.5))
    with other_process(1000) as (_, lent):
        reader.read(lent, [(900, into.data)], deadline(HANG_S))
        assert np.array_equal(into, expected(900, 100))


@needs_nixl
def test_who_stands_still_is_waited_for_until_the_deadline(reader, monkeypatch):
    into = np.zeros(100, np.uint8)
    with other_process(1000) as (_, lent):
        reader.read(lent, [(0, into.data)], deadline(HANG_S))
        agent = reader._agent
        assert agent is not None
        monkeypatch.setattr(agent._agent, "check_xfer_state", lambda handle: "PROC")
        monkeypatch.setattr(agent._agent, "transfer", lambda handle: "PROC")
        gone = weakref.ref(agent)
        del agent
        with pytest.raises(TimeoutError) as failure:
            reader.read(lent, [(0, into.data)], deadline(0.01))
        assert gone() is None, f"what {failure.value} knows keeps no agent, whose memory is gone"
        reader.read(lent, [(9, into.data)], deadline(HANG_S))
        assert np.array_equal(into, expected(9, 100)), "by another agent"


@needs_nixl
def test_who_waits_for_other_reads_blames_nobody(reader):
    with reader._lock:
        with pytest.raises(BusyError):
            reader.read(Lent("", 0), [(0, memoryview(bytearray(1)))], deadline(0.0))
        reader.read(Lent("", 0), [], deadline(0.0))  # nothing to read


def test_an_engine_that_others_kept_from_reading_is_asked_again(monkeypatch, caplog):
    monkeypatch.setattr(test_peers, "NixlLender", StandInLender)
    stand_in: Any = StandInReader()
    with prefill(by_nixl=True) as has, store(nixl=stand_in) as fetches:
        assert num_right(fetched(fetches, has.source()), has) == 0
        assert num_right(fetched(fetches, has.source()), has) == NUM_PAGES
    assert "hands nothing over" not in caplog.text


@needs_nixl
def test_pages_arrive_over_nixl_and_count_as_fetched(reader):
    with prefill(by_nixl=True) as has, store(nixl=reader) as fetches:
        assert num_right(fetched(fetches, has.source()), has) == NUM_PAGES
        until(lambda: len(has.handover.got) == NUM_PAGES)
        del has.handover.entries[KEYS[1]]
        assert [page is None for page in fetched(fetches, has.source())] == [False, True, False]


@needs_nixl
def test_an_engine_that_does_not_lend_by_nixl_is_told_and_asked_nothing(reader, caplog):
    with prefill() as has, store(nixl=reader) as fetches:
        assert num_right(fetched(fetches, has.source()), has) == 0
    assert "does not lend by NIXL: set transport of both to nixl" in caplog.text


def test_a_missing_package_is_told_ahead_of_a_start(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = KVTransferConfig(kv_connector="PeerConnector", kv_connector_extra_config={"transport": "nixl"})
    with pytest.raises(ConfigError, match=r"there is no package nixl here: pip install"):
        check_installed(asked)


def test_an_engine_without_nixl_cannot_be_told_to_read_by_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    for made in (lambda: NixlReader(PAGE_BYTES), lambda: NixlLender(np.zeros(9, np.uint8))):
        with pytest.raises(OSError, match="NIXL cannot be used here"):
            made()
