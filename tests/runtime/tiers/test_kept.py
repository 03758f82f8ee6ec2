"""Slots that outlive a process: the next one finds what is whole, and nothing of others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mllm_compile.runtime.schedule.tiers.index import Entry, TierIndex
from mllm_compile.runtime.tiers import kept as module
from mllm_compile.runtime.tiers.connector import KVConnectorError, Namespace
from mllm_compile.runtime.tiers.kept import KeptLedger, KeptSlots, held_bytes, held_descriptor
from mllm_compile.runtime.tiers.names import KEPT_FILE, KEPT_VARIABLE
from mllm_compile.server.kept_memory import KeptMemory

NAMESPACE = Namespace.of({"model": "a"}, 8192, 4096)
ENTRIES = [
    Entry(bytes([n]) * 16, bytes([n + 1]) * 16, b"f" * 16, 64 * n, n, used=float(n), until=5.0) for n in range(3)
]


@pytest.fixture
def descriptor() -> Iterator[int]:
    memory = KeptMemory()
    yield memory.descriptor
    memory.close()


def opened(descriptor: int, namespace: Namespace = NAMESPACE, slots: int = 4, secret: bytes | None = None) -> KeptSlots:
    return KeptSlots(descriptor, namespace, slots, 2, secret)


def found(kept: KeptSlots) -> list[tuple[bytes, bytes, int, int, float, bool]]:
    return [(one.key, one.parent, one.depth, one.slot, one.used, state) for one, state in kept.entries()]


def filled(descriptor: int) -> KeptSlots:
    kept = opened(descriptor)
    for entry in ENTRIES:
        kept.put(entry, is_state=False)
    kept.put(Entry(b"s" * 16, b"", b"f" * 16, 64, 1), is_state=True)
    kept.map[kept.data_start : kept.data_start + 4] = b"page"
    return kept


def test_the_next_process_finds_entries_with_their_slots_and_the_secret(descriptor: int) -> None:
    first = filled(descriptor)
    expected = found(first)
    first.close()
    again = opened(descriptor)
    assert again.secret == first.secret
    assert found(again) == expected
    assert len(expected) == 4
    assert again.map[again.data_start : again.data_start + 4] == b"page"
    again.close()


def test_dropped_entries_are_gone_and_uses_are_kept(descriptor: int) -> None:
    first = filled(descriptor)
    ENTRIES[1].used = 9.0
    first.use(ENTRIES[1], is_state=False)
    first.drop(ENTRIES[0], is_state=False)
    first.close()
    again = opened(descriptor)
    assert [(slot, used) for _, _, _, slot, used, state in found(again) if not state] == [(1, 9.0), (2, 2.0)]
    again.close()


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": Namespace.of({"model": "b"}, 8192, 4096)},
        {"namespace": Namespace.of({"model": "a"}, 4096, 4096)},
        {"slots": 5},
        {"secret": b"another" * 4},
    ],
    ids=["model", "bytes", "slots", "secret"],
)
def test_what_does_not_fit_is_given_back_and_begun_anew(descriptor: int, change: dict[str, object]) -> None:
    filled(descriptor).close()
    other = opened(descriptor, **change)  # type: ignore[arg-type]
    assert not found(other)
    assert held_bytes(descriptor) < 1 << 16
    assert not any(other.map[other.data_start : other.data_start + 4])
    other.close()


@pytest.mark.parametrize("at", [0, 9, 30, 60, 80, 4096, 4096 + 17, 4096 + 35, 4096 + 56])
def test_a_changed_byte_of_header_or_table_is_found(descriptor: int, at: int) -> None:
    first = filled(descriptor)
    first.map[at] ^= 1
    first.close()
    again = opened(descriptor)
    assert len(found(again)) == (0 if at < 4096 else 3)
    again.close()


def test_the_end_gives_the_memory_of_empty_slots_back(descriptor: int) -> None:
    first = filled(descriptor)
    first.map[first.data_start :] = bytes([7]) * (first.num_bytes - first.data_start)
    held = held_bytes(descriptor)
    first.close()  # slot 3 of pages and 0 of states, which are neighbours, are empty
    assert held_bytes(descriptor) == held - 8192 - 4096
    again = opened(descriptor)
    assert len(found(again)) == 4
    for entry, is_state in again.entries():
        start = again.data_start + (4 * 8192 if is_state else 0) + entry.slot * (4096 if is_state else 8192)
        size = 4096 if is_state else 8192
        assert again.map[start : start + size] == bytes([7]) * size
    again.void()
    again.close()
    assert held_bytes(descriptor) < 1 << 16


def test_new_weights_let_the_next_process_find_nothing(descriptor: int) -> None:
    first = filled(descriptor)
    first.void()
    first.close()
    again = opened(descriptor)
    assert not found(again)
    again.close()


def test_two_engines_never_have_it_at_once(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first = filled(descriptor)
    monkeypatch.setattr(module, "_LOCK_S", 1e9)  # nobody waits for an owner that lives
    with pytest.raises(KVConnectorError, match="used by another process"):
        opened(descriptor)
    assert len(found(first)) == 4
    first.close()
    opened(descriptor).close()


@pytest.mark.parametrize("is_seen", [False, True])
def test_an_owner_that_is_about_to_end_or_not_seen_is_waited_for(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    first, asked = filled(descriptor), list[int]()

    def stays(process: int) -> bool:
        asked.append(process)
        first.close()
        return False

    if is_seen:
        monkeypatch.setattr(module, "_stays", stays)
    else:  # as of another container
        monkeypatch.setattr(module, "_owners", lambda _: [] if asked else [stays(0)][:0])
    opened(descriptor).close()
    assert asked == [os.getpid() if is_seen else 0]


def test_a_process_stays_until_it_is_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert module._stays(child.pid)
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not module._stays(child.pid)
        child.wait()
    assert not module._stays(child.pid)


def test_an_index_notes_all_that_it_does(descriptor: int) -> None:
    kept = opened(descriptor)
    index = TierIndex(4, ledger=KeptLedger(kept, is_state=False))
    for number in range(6):  # two are given up for others
        (slot,) = index.take(1)
        index.put(Entry(bytes([number]) * 16, b"p" * 16, b"f" * 16, 4, slot))
    index.bias([bytes([5]) * 16], is_ended=True, until=0.0)
    expected = {(one.key, one.slot, one.is_ended) for one in index}
    assert {(one.key, one.slot, one.is_ended) for one, _ in kept.entries()} == expected
    again = TierIndex(4, ledger=KeptLedger(kept, is_state=False))
    again.restore(sorted((one for one, _ in kept.entries()), key=lambda one: one.used))
    assert {(one.key, one.slot, one.is_ended) for one in again} == expected
    assert again.num_free == 0
    again.clear()
    assert not found(kept)
    assert again.num_free == 4
    kept.close()


def test_only_a_file_that_was_given_is_taken(descriptor: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(KEPT_VARIABLE, str(descriptor))
    assert held_descriptor() == descriptor
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{KEPT_FILE}")
    with (tmp_path / "file").open("wb") as file:
        for wrong in (str(file.fileno()), "999999", "no", "-1", ""):
            monkeypatch.setenv(KEPT_VARIABLE, wrong)
            assert held_descriptor() is None
    monkeypatch.delenv(KEPT_VARIABLE)
    assert held_descriptor() is None


def test_a_process_that_is_killed_at_any_moment_leaves_a_table_of_whole_slots(descriptor: int) -> None:
    """A fork fills slots with their entry's number ahead of its record, over and over, until it is killed."""
    opened(descriptor).close()
    child = os.fork()
    if child == 0:
        kept = opened(descriptor)
        index = TierIndex(4, ledger=KeptLedger(kept, is_state=False))
        number = 0
        while True:
            number += 1
            for slot in index.take(1):
                start = kept.data_start + slot * NAMESPACE.page_bytes
                np.frombuffer(kept.map, dtype=np.int64, count=1024, offset=start)[:] = number
                index.put(Entry(number.to_bytes(16, "little"), b"p" * 16, b"f" * 16, 4, slot))
    before = 0
    try:
        while held_bytes(descriptor) <= 1 << 13 or before < 4:
            table = os.pread(descriptor, 512, 4096)
            before = sum(any(table[start + 88 : start + 96]) for start in range(0, 512, 128))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    kept = opened(descriptor)
    entries = [entry for entry, _ in kept.entries()]
    assert len(entries) >= 3
    for entry in entries:
        start = kept.data_start + entry.slot * NAMESPACE.page_bytes
        content = np.frombuffer(kept.map, dtype=np.int64, count=1024, offset=start)
        assert (content == int.from_bytes(entry.key, "little")).all()
    kept.close()
