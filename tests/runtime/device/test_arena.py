"""Arenas, and the calls of the driver that give their memory back and take it anew."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.errors import DeviceError, DeviceMemoryError
from mllm_compile.process.passage import Passage, close_all
from mllm_compile.runtime.cuda.chunks import Chunks
from mllm_compile.runtime.cuda.virtual_memory import VirtualMemory
from mllm_compile.runtime.device.arena import arena_on
from mllm_compile.runtime.device.sleep import MEMORY_TAGS, SleepingMemory
from tests.hang_guard import HANG_S
from tests.sleeping_arena import Machine

MIB = 1 << 20
OUT_OF_MEMORY = 2


def test_tensors_of_a_stretch_are_apart_and_aligned():
    arena = Machine().arena()
    kinds = [((3, 5), torch.bfloat16), ((0, 4), torch.float32), ((), torch.int64), ((7,), torch.uint8)]
    tensors = arena.zeros(kinds)
    assert [(tuple(one.shape), one.dtype) for one in tensors] == kinds
    starts = [one.data_ptr() - tensors[0].data_ptr() for one in tensors if one.numel()]
    assert starts == [0, 512, 1024] and arena.num_bytes == 1536
    for number, one in enumerate(tensors):
        one.fill_(number)
    assert [set(one.flatten().tolist()) for one in tensors] == [{0.0}, set(), {2}, {3}]
    assert arena.empty([]) == [] and len(arena.zeros([((0,), torch.float32)])[0]) == 0


def test_an_arena_wakes_wholly_or_not():
    machine = Machine()
    arena = machine.arena()
    held = [arena.zeros([((64,), torch.float64)]) for _ in range(3)]
    arena.sleep()
    machine.size = 1024
    with pytest.raises(DeviceMemoryError):
        arena.wake()
    assert machine.taken == 0 and not arena.is_awake
    machine.size = 1536
    arena.wake()
    assert machine.taken == 1536 and arena.is_awake and not any(bool(one.any()) for (one,) in held)


def test_memory_stays_while_another_thread_reads_it():
    machine = Machine()
    arena = machine.arena()
    (held,) = arena.zeros([((64,), torch.float64)])
    with arena.staying() as is_awake:
        begun = threading.Event()
        sleeper = threading.Thread(target=lambda: (begun.set(), arena.sleep()))
        sleeper.start()
        assert begun.wait(HANG_S)
        assert is_awake and sleeper.is_alive() and machine.taken == 512 and not held.any()
    sleeper.join(HANG_S)
    with arena.staying() as is_awake:
        assert not is_awake and machine.taken == 0


def test_a_cpu_has_no_arena():
    assert arena_on(torch.device("cpu")) is None


def test_an_engine_that_sleeps_hands_memory_over_and_one_that_wakes_takes_it_first():
    machine, (ours, its) = Machine(), Passage.pair()
    theirs, before = Passage(its), open_files()
    memories = []
    for passage in (ours, theirs):
        weights, cache = machine.arena(), machine.arena()
        held = [*weights.zeros([((8,), torch.uint8)]), *cache.zeros([((8,), torch.uint8)])]
        held[0].fill_(5)
        memory = SleepingMemory(torch.device("cpu"), weights, [], [cache])
        memory.passage = passage
        memories.append((memory, held))
    (first, _), (second, held) = memories
    second.sleep(MEMORY_TAGS, 0)
    taken = ours.take()
    assert len(taken) == 2 and not any(map(os.get_inheritable, taken))
    close_all(taken)
    first.sleep(MEMORY_TAGS, 0)
    second.wake(MEMORY_TAGS)
    assert machine.num_handed_over == 2 and [one.unique().tolist() for one in held] == [[5], [0]]
    second.sleep(MEMORY_TAGS, 0)
    first.sleep(MEMORY_TAGS, 0)  # it was asleep, as one whose wake has failed: what has come is the device's
    assert not ours.take() and not theirs.take()
    first.wake(MEMORY_TAGS)
    assert machine.num_handed_over == 2 and open_files() == before
    ours.close()
    theirs.close()


class PlayedDriver:
    """A driver whose device memory is the host's, and which counts it.

    Attributes:
        handles: bytes of memory by its number, as often as one is held by a number.
        mapped: the memory behind an address.
        left: calls of cuMemCreate until memory is full.
        has_descriptors: memory can be handed over. A file is its descriptor, whose bytes are the memory's number.
    """

    def __init__(self, left: int = 100, fails: str = "", has_descriptors: bool = True) -> None:
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.behind: dict[int, int] = {}  # address → number of the memory
        self.exportable: set[int] = set()
        self.contents: dict[int, bytes] = {}  # of memory that is behind no address
        self.has_descriptors = has_descriptors
        self.reserved: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.pinned: dict[int, int] = {}  # bytes of a part
        self.left, self._fails = left, fails
        self.numbers = 0
        self.depth = 0  # of contexts that were pushed
        self.opened: list[tuple[int, int]] = []
        self.copies_up: list[int] = []
        self.waits = 0  # for the default stream

    def cuCtxPushCurrent_v2(self, context) -> int:
        self.depth += 1
        return 0

    def cuCtxPopCurrent_v2(self, context) -> int:
        self.depth -= 1
        return 0

    def cuCtxSetCurrent(self, context) -> int:
        raise AssertionError("a caller's thread keeps its device")

    def __getattr__(self, name: str):
        return lambda *arguments: 7 if name == self._fails else 0

    def cuMemAddressReserve(self, address, size, *rest) -> int:
        memory = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(memory)
        self.reserved[address._obj.value] = memory
        return 0

    def cuMemAddressFree(self, address, size) -> int:
        return 0 if self.reserved.pop(address.value) is not None else 1

    def cuDeviceGetAttribute(self, value, attribute, device) -> int:
        assert attribute.value == 103
        value._obj.value = self.has_descriptors
        return 0

    def cuMemCreate(self, handle, size, kind, flags) -> int:
        if not self.left:
            return OUT_OF_MEMORY
        self.left -= 1
        self.numbers += 1
        handle._obj.value = self.numbers
        self.handles[self.numbers] = size.value
        if kind._obj.handles:
            self.exportable.add(self.numbers)
        return 0

    def cuMemMap(self, address, size, offset, handle, flags) -> int:
        assert self.handles[handle.value] == size.value and address.value not in self.mapped
        self.mapped[address.value], self.behind[address.value] = size.value, handle.value
        if content := self.contents.get(handle.value):
            ctypes.memmove(address.value, content, size.value)
        return 7 if self._fails == "cuMemMap" and self.mapped.pop(address.value) else 0

    def cuMemRetainAllocationHandle(self, handle, address) -> int:
        handle._obj.value = self.behind[address.value]
        self.handles[handle._obj.value] = self.mapped[address.value]
        return 0

    def cuMemExportToShareableHandle(self, descriptor, handle, kind, flags) -> int:
        if handle.value not in self.exportable:
            return 801
        descriptor._obj.value = os.memfd_create("chunk")
        os.write(descriptor._obj.value, b"%d" % handle.value)
        return 0

    def cuMemImportFromShareableHandle(self, handle, descriptor, kind) -> int:
        if self._fails == "cuMemImportFromShareableHandle":
            return 7
        number = int(os.pread(descriptor.value, 20, 0))
        handle._obj.value, self.handles[number] = number, 4 * MIB
        return 0

    def cuMemSetAccess(self, address, size, *rest) -> int:
        self.opened.append((address.value, size.value))
        return 7 if self._fails == "cuMemSetAccess" else 0

    def cuStreamSynchronize(self, stream) -> int:
        self.waits += 1
        return 0

    def cuMemRelease(self, handle) -> int:
        del self.handles[handle.value]
        return 0

    def cuMemUnmap(self, address, size) -> int:
        self.opened = [one for one in self.opened if one != (address.value, size.value)]
        self.contents[self.behind.pop(address.value)] = ctypes.string_at(address.value, size.value)
        assert self.mapped.pop(address.value) == size.value
        ctypes.memset(address.value, 0xFF, size.value)
        return 0

    def cuMemsetD8Async(self, address, value, size, stream) -> int:
        ctypes.memset(address.value, value.value, size.value)
        return 0

    def cuMemHostRegister_v2(self, address, size, flags) -> int:
        self.pinned[address.value] = size.value
        return 0

    def cuMemHostUnregister(self, address) -> int:
        del self.pinned[address.value]
        return 0

    def is_pinned(self, address: int, size: int) -> bool:
        """True if a copy stays within one part."""
        return any(start <= address and address + size <= start + count for start, count in self.pinned.items())

    def cuMemcpyDtoHAsync_v2(self, to, source, size, stream) -> int:
        assert self.is_pinned(to.value, size.value)
        ctypes.memmove(to.value, source.value, size.value)
        return 0

    def cuMemcpyHtoDAsync_v2(self, to, source, size, stream) -> int:
        assert any(0 <= to.value - start < count for start, count in self.opened), "it may be written"
        assert self.is_pinned(source.value, size.value)
        self.copies_up.append(size.value)
        ctypes.memmove(to.value, source.value, size.value)
        return 0


@pytest.fixture
def play(driver, monkeypatch):
    def use(played: PlayedDriver) -> PlayedDriver:
        driver()
        monkeypatch.setattr("mllm_compile.runtime.cuda.driver._driver", lambda: played)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
        monkeypatch.setattr("mllm_compile.runtime.cuda.virtual_memory._PART", 4 * MIB)
        return played

    return use


def content(memory: VirtualMemory) -> bytes:
    address, size = memory.__cuda_array_interface__["data"][0], memory.num_bytes
    return ctypes.string_at(address, size)


def test_memory_goes_and_comes_behind_the_same_addresses(play):
    played = play(PlayedDriver())
    memory = VirtualMemory(9 * MIB + 1, torch.device("cuda"))
    assert memory.num_bytes == 10 * MIB and sorted(played.mapped.values()) == [2 * MIB, 4 * MIB, 4 * MIB]
    assert not played.handles, "a mapping holds its memory by itself"
    interface = memory.__cuda_array_interface__
    memory.fill_zeros()
    memory.save()
    for _ in range(2):
        memory.unmap()
        assert not played.mapped and content(memory) == b"\xff" * memory.num_bytes
    for _ in range(2):
        memory.map(restores=True)
    assert played.copies_up == [4 * MIB, 4 * MIB, 2 * MIB], "each part is copied when it is there"
    assert len(played.mapped) == 3 and content(memory) == bytes(memory.num_bytes)
    assert memory.__cuda_array_interface__ == interface and list(played.pinned.values()) == [4 * MIB, 4 * MIB, 2 * MIB]
    memory.pin_copy()
    assert len(played.pinned) == 3, "the host's memory stays for the next copy"
    del memory
    gc.collect()
    assert not (played.mapped or played.reserved or played.pinned), "all goes with the last tensor"
    assert played.depth == 0


@pytest.mark.parametrize("left", [0, 1, 2])
def test_memory_that_is_full_leaves_nothing_behind(play, left):
    played = play(PlayedDriver(left))
    with pytest.raises(DeviceMemoryError, match=r"\(2\) to taking \d+ bytes"):
        VirtualMemory(10 * MIB, torch.device("cuda"))
    gc.collect()
    assert not (played.mapped or played.handles or played.reserved or played.depth)
    played.left = 3
    memory = VirtualMemory(10 * MIB, torch.device("cuda"))
    memory.unmap()
    played.left = left
    with pytest.raises(DeviceMemoryError):
        memory.map()
    assert not (played.mapped or played.handles) and len(played.reserved) == 1
    played.left = 3
    memory.map()
    assert len(played.mapped) == 3


@pytest.mark.parametrize("fails", [True, False])
def test_the_host_s_memory_is_given_back_with_the_arena_or_where_the_driver_refuses_a_part(play, fails):
    played = play(PlayedDriver())
    memory = VirtualMemory(10 * MIB, torch.device("cuda"))
    if fails:
        took = played.cuMemHostRegister_v2
        played.cuMemHostRegister_v2 = lambda *part: OUT_OF_MEMORY if played.pinned else took(*part)
        with pytest.raises(DeviceMemoryError, match=rf"\(2\) to pinning {10 * MIB} bytes of the host"):
            memory.pin_copy()
    else:
        memory.pin_copy()
        del memory
    gc.collect()
    assert not played.pinned


def test_memory_that_is_full_amid_a_copy_waits_for_it(play):
    played = play(PlayedDriver())
    memory = VirtualMemory(10 * MIB, torch.device("cuda"))
    memory.save()
    memory.unmap()
    waits = played.waits
    played.left = 2
    with pytest.raises(DeviceMemoryError):
        memory.map(restores=True)
    assert played.waits == waits + 1 and not played.mapped and played.copies_up == [4 * MIB, 4 * MIB]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_handed_over_as_it_is_and_back(play):
    """In whole parts: the driver maps what it has given as one alone. What is left goes back to the device."""
    played, before = play(PlayedDriver()), open_files()
    first, second = (VirtualMemory(10 * MIB, torch.device("cuda")) for _ in range(2))
    second.unmap()
    first.fill_zeros()
    left = played.left
    for giver, taker in [(first, second), (second, first), (first, second)]:
        chunks = Chunks()
        giver.unmap(chunks)
        assert len(chunks) == 2 and not any(map(os.get_inheritable, chunks._descriptors))
        taker.map(chunks=chunks)
        assert not chunks and len(played.mapped) == 3 and not played.handles
        left -= 1
        assert played.left == left, "the rest of a stretch is taken anew"
        assert content(taker)[: 8 * MIB] == bytes(8 * MIB), "and nothing else"
    chunks = Chunks()
    second.unmap(chunks)
    chunks.close()
    second.map()
    second.unmap()
    del first, second, giver, taker
    gc.collect()
    assert not (played.mapped or played.reserved or played.depth) and open_files() == before


@pytest.mark.parametrize("case", ["no descriptors", "not imported", "full", "not mapped"])
def test_memory_that_cannot_be_handed_over_goes_by_the_device(play, case):
    played, before = play(PlayedDriver(has_descriptors=case != "no descriptors")), open_files()
    first, second = (VirtualMemory(10 * MIB, torch.device("cuda")) for _ in range(2))
    second.unmap()
    chunks = Chunks()
    first.unmap(chunks)
    assert len(chunks) == (0 if case == "no descriptors" else 2)
    played._fails = {"not imported": "cuMemImportFromShareableHandle", "not mapped": "cuMemMap"}.get(case, "")
    if case == "full":
        played.left = 0
    if case in ("full", "not mapped"):
        with pytest.raises(DeviceError):
            second.map(chunks=chunks)
        assert not (played.mapped or played.handles), "what had come is the device's"
    else:
        second.map(chunks=chunks)
        assert len(played.mapped) == 3
        second.unmap()
    chunks.close()
    assert open_files() == before


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_what_the_driver_refuses_leaves_nothing_behind(play, call):
    played = play(PlayedDriver(fails=call))
    with pytest.raises(DeviceError, match=r"\(7\)"):
        VirtualMemory(10 * MIB, torch.device("cuda"))
    gc.collect()
    assert not (played.mapped or played.handles or played.reserved)
