"""CUDA memory of another process, over a fake driver: bounds, devices, events, and what is given back."""

from __future__ import annotations

import ctypes
import os
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mllm_compile.errors import DeviceError, TransferError, WeightUpdateError
from mllm_compile.runtime.cuda.driver import PeerMemory
from mllm_compile.transfer import opened as opened_module
from mllm_compile.transfer.handles import NO_MEMORY, CudaMemory, Given
from mllm_compile.transfer.opened import opened
from mllm_compile.transfer.shared_memory import FOLDER

GPU = torch.device("cuda", 1)
DATA = torch.arange(64, dtype=torch.uint8)
BEFORE = 16  # bytes of the allocation ahead of what its handle opens
HANDLE = bytes(range(64))


@pytest.fixture
def gpu(monkeypatch):
    """An allocation in this process' memory, as the driver would tell of it."""
    memory = ctypes.create_string_buffer(bytes(BEFORE) + DATA.numpy().tobytes())
    start = ctypes.addressof(memory)
    told = SimpleNamespace(device=1, done=[], fails=False)

    def of_other(handle: bytes, device: torch.device) -> Any:
        if told.fails:
            raise DeviceError("the driver answers invalid value")
        give_back = lambda is_own: told.done.append("given back")  # noqa: E731
        return SimpleNamespace(address=start + BEFORE, handle=handle, give_back=give_back)

    def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=address - start)

    stream = SimpleNamespace(synchronize=lambda: told.done.append("synchronised"))
    event = SimpleNamespace(wait=lambda on: told.done.append(("waited", on is stream)))
    monkeypatch.setattr(PeerMemory, "of_other", of_other)
    monkeypatch.setattr(opened_module, "allocation_of", lambda address: (start, len(memory.raw) - 1))
    monkeypatch.setattr(opened_module, "device_of", lambda address: told.device)
    monkeypatch.setattr(opened_module, "tensor_at", tensor_at)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda.Event, "from_ipc_handle", lambda device, handle: event)
    return told


@pytest.fixture
def counts():
    """A file of torch's counts of receivers; the third one is of a tensor that two have."""
    path = FOLDER / f"mllm-test-{os.getpid()}"
    path.write_bytes(bytes(64) + struct.pack("3q", 0, 0, 2) + bytes(8 * 9997))
    yield path
    path.unlink()


def test_tensors_are_where_their_handles_say(gpu, counts):
    memory = CudaMemory(HANDLE, (f"/{counts.name}", 2), bytes(64))
    given = [
        Given("a", torch.int16, (2, 3), memory, 8),
        Given("unaligned", torch.int32, (1,), memory, 21),
        Given("last", torch.uint8, (4,), memory, 60),
        Given("empty", torch.float32, (0, 3), memory, 0),
    ]
    with opened(given, GPU) as tensors:
        found = dict(tensors)
        assert gpu.done == [("waited", True)]
    assert torch.equal(found["a"], DATA[8:20].view(torch.int16).view(2, 3))
    assert torch.equal(found["unaligned"].view(torch.uint8), DATA[21:25])
    assert torch.equal(found["last"], DATA[60:])
    assert found["empty"].shape == (0, 3)
    assert gpu.done == [("waited", True), "synchronised", "given back"]  # nobody reads it any more
    assert struct.unpack_from("3q", counts.read_bytes(), 64) == (0, 0, 1)


def test_a_tensor_without_numbers_needs_no_memory(gpu):
    gpu.fails = True
    with opened([Given("empty", torch.float32, (0, 3), NO_MEMORY, 0)], GPU) as tensors:
        assert dict(tensors)["empty"].shape == (0, 3)
    with pytest.raises(WeightUpdateError, match="ends at byte 4 of memory of 0"):
        opened([Given("a", torch.float32, (1,), NO_MEMORY, 0)], GPU).__enter__()


def test_what_is_beyond_its_memory_or_of_another_gpu_is_not_read(gpu):
    memory = CudaMemory(HANDLE)
    beyond = [Given("a", torch.uint8, (4,), memory, 0), Given("b", torch.uint8, (5,), memory, 60)]
    with pytest.raises(WeightUpdateError, match="'b' ends at byte 65 of memory of 64"), opened(beyond, GPU):
        pass
    gpu.device = 0
    with pytest.raises(WeightUpdateError, match="GPU 0's memory, and the engine is on 1"), opened(beyond[:1], GPU):
        pass
    assert gpu.done == ["synchronised", "given back"] * 2
    gpu.fails = True
    with pytest.raises(TransferError, match="cannot be opened"), opened(beyond[:1], GPU):
        pass


def test_a_sender_is_let_go_of_where_its_memory_cannot_be_opened(gpu, counts):
    gpu.fails = True
    memory = CudaMemory(HANDLE, (f"/{counts.name}", 2))
    with (
        pytest.raises(TransferError, match="cannot be opened"),
        opened([Given("a", torch.uint8, (4,), memory, 0)], GPU),
    ):
        pass
    assert struct.unpack_from("3q", counts.read_bytes(), 64) == (0, 0, 1)


@pytest.mark.parametrize("place", [10_000, 1 << 60])
def test_a_count_beyond_its_file_is_not_lowered(gpu, counts, place):
    before = counts.read_bytes()
    memory = CudaMemory(HANDLE, (counts.name, place))
    given = [Given("a", torch.uint8, (4,), memory, 0)]
    with pytest.raises(WeightUpdateError, match="beyond its file"), opened(given, GPU):
        pass
    assert counts.read_bytes() == before
