"""Copies to slots and back give the bytes that were there, on a CPU."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.tiers.connector import Namespace
from mllm_compile.runtime.tiers.copies import _LOOKUPS, SlotCopies
from mllm_compile.runtime.tiers.disk import DiskFiles
from mllm_compile.runtime.tiers.layout import SlotLayout
from mllm_compile.runtime.tiers.place import Place
from mllm_compile.runtime.tiers.rows import DeviceRows, HostRows, addresses
from tests.hang_guard import HANG_S


def entries(*slots: int) -> list[Entry]:
    return [Entry(bytes([slot]), b"", b"", 4, slot) for slot in slots]


def test_pages_and_states_come_back_from_their_slots() -> None:
    keys, values = torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 4).to(torch.bfloat16)
    states = torch.randn(2, 5, 3)
    copies = SlotCopies(SlotLayout([keys, values]), SlotLayout([*states]), 4, 2, torch.device("cpu"))
    kept = keys.clone(), values.clone(), states.clone()
    copies.begin(Ticket("store", entries(2, 0), np.array([5, 1])))
    copies.begin(Ticket("store", entries(1), np.array([3]), is_state=True))
    copies.wait()
    for pool in (keys, values, states):
        pool.zero_()
    copies.begin(Ticket("load", entries(0, 2), np.array([4, 5])))
    copies.begin(Ticket("load", entries(1), np.array([2]), is_state=True))
    copies.wait()
    over = copies.finished()
    assert len(over) == 4
    assert not any(ticket.failed.any() for ticket in over)
    assert torch.equal(keys[[4, 5]], kept[0][[1, 5]])
    assert torch.equal(values[[4, 5]], kept[1][[1, 5]])
    assert torch.equal(states[:, 2], kept[2][:, 3])
    assert not keys[:4].any()
    copies.close()


def test_memory_is_told_when_an_engine_works_and_when_a_rank_copies() -> None:
    copies = SlotCopies(SlotLayout([torch.zeros(6, 4)]), SlotLayout([]), 4, 0, torch.device("cpu"))
    for work in (copies.finished, lambda: copies.begin(Ticket("store", entries(2), np.array([5])))):
        copies._memory.step_s = -1.0
        work()
        assert copies._memory.step_s >= 0
    copies.wait()
    copies.close()


def test_the_tier_below_is_asked_about_many_requests_at_once() -> None:
    together = threading.Barrier(_LOOKUPS)

    def lookup(places: list[Place]) -> list[bool]:
        together.wait(HANG_S)  # of one that is asked alone a broken barrier
        return [True] * len(places)

    store = SimpleNamespace(lookup=lookup, close=lambda: None)
    copies = SlotCopies(SlotLayout([torch.randn(3, 4)]), SlotLayout([]), 2, 0, torch.device("cpu"), store)
    for slot in range(_LOOKUPS):
        copies.begin(Ticket("lookup", entries(slot)))
    copies.wait()
    over = copies.finished()
    assert len(over) == _LOOKUPS
    assert not any(ticket.failed.any() for ticket in over)
    copies.close()


def test_a_copy_that_fails_says_so_and_others_go_on() -> None:
    keys = torch.randn(3, 4)
    copies = SlotCopies(SlotLayout([keys]), SlotLayout([]), 2, 0, torch.device("cpu"))
    copies.begin(Ticket("store", entries(0), np.array([7])))
    copies.begin(Ticket("store", entries(1), np.array([2])))
    copies.wait()
    assert [ticket.failed.tolist() for ticket in copies.finished()] == [[True], [False]]
    copies.close()


def test_a_copy_that_fails_in_its_midst_is_over_when_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def fails(*arguments: object) -> None:
        raise RuntimeError("the third of five calls is refused")

    ends = {"end": lambda: lambda: waited.append(1), "most": 1}
    copier = SimpleNamespace(begin_behind=lambda launched: None, load=fails, store=fails, **ends)
    monkeypatch.setattr("mllm_compile.runtime.tiers.copies.copier_on", lambda device: copier)
    copies = SlotCopies(SlotLayout([torch.randn(3, 4)]), SlotLayout([]), 2, 0, torch.device("cpu"))
    copies.begin(Ticket("load", entries(0), np.array([1])))
    copies.wait()
    assert [ticket.failed.tolist() for ticket in copies.finished()] == [[True]]
    assert waited
    copies.close()


def test_a_batch_has_the_address_of_each_section_of_each_page() -> None:
    keys, values = torch.arange(6 * 8).view(6, 8), torch.arange(6 * 16, dtype=torch.int16).view(6, 16)
    layout = SlotLayout([keys, values])
    host = HostRows(layout, torch.zeros(4 * layout.slot_bytes, dtype=torch.uint8))
    on_device, on_host, sizes = addresses(DeviceRows(layout), np.array([5, 1]), host, np.array([0, 3]))
    for target, source, size in zip(on_host.tolist(), on_device.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
    for slot, row in ((0, 5), (3, 1)):
        found = host.slots[slot].numpy().tobytes()
        assert found[: layout.num_bytes] == keys[row].numpy().tobytes() + values[row].numpy().tobytes()
    assert not host.slots[1:3].any()


def test_a_gpus_next_copy_is_queued_while_one_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    queued = threading.Event()

    def load(pool: object, rows: np.ndarray, host: object, slots: np.ndarray) -> None:
        told.append(f"queued {slots[0]}")
        if slots[0] == 1:
            queued.set()

    def end() -> object:
        number = len([one for one in told if one.startswith("queued")]) - 1
        return lambda: (queued.wait(), told.append(f"over {number}"))

    copier = SimpleNamespace(begin_behind=lambda launched: None, load=load, store=load, end=end, most=2)
    monkeypatch.setattr("mllm_compile.runtime.tiers.copies.copier_on", lambda device: copier)
    copies = SlotCopies(SlotLayout([torch.randn(3, 4)]), SlotLayout([]), 3, 0, torch.device("cpu"))
    for slot in range(3):
        copies.begin(Ticket("load", entries(slot), np.array([1]), from_below=np.array([False])))
    copies.wait()
    assert told.index("queued 1") < told.index("over 0"), told
    assert [one for one in told if "over" in one] == ["over 0", "over 1", "over 2"]
    assert [ticket.slots.tolist() for ticket in copies.finished()] == [[0], [1], [2]]
    copies.close()


def test_slots_are_cut_into_chunks_that_hold_whole_ones() -> None:
    layout = SlotLayout([torch.zeros(2, 9 << 20, dtype=torch.uint8)])
    assert layout.chunk_slots == 3
    assert layout.chunks(7) == [3 * layout.slot_bytes, 3 * layout.slot_bytes, layout.slot_bytes]
    assert SlotLayout([]).chunks(5) == []


class FullDisk(DiskFiles):
    """A folder on a disk that has no room left."""

    def _write(self, place: Place, data: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_writing_with_one_line_and_copies_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = torch.randn(3, 2048)
    files = FullDisk(tmp_path, Namespace.of({}))
    copies = SlotCopies(SlotLayout([keys]), SlotLayout([]), 2, 0, torch.device("cpu"), files)
    copies.begin(Ticket("store", entries(0, 1), np.array([1, 2])))
    copies.wait()
    for _ in range(2):
        copies.begin(Ticket("write", entries(0, 1)))
    copies.wait()
    copies.begin(Ticket("load", entries(0), np.array([0]), from_below=np.array([False])))
    copies.wait()
    assert [ticket.failed.tolist() for ticket in copies.finished()] == [[False] * 2, [True] * 2, [True] * 2, [False]]
    assert torch.equal(keys[0], keys[1])
    assert [record.getMessage() for record in caplog.records] == [
        "no more is written to runtime.kv_offloading_disk_path: [Errno 28] No space left on device"
    ]
    copies.close()
