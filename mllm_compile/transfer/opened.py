"""Opens the memory of tensors that another process gives, and holds them against it before any is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from mllm_compile.errors import DeviceError, TransferError, WeightUpdateError
from mllm_compile.runtime.cuda.driver import PeerMemory, allocation_of, device_of
from mllm_compile.transfer.handles import CPU, NO_MEMORY, CudaMemory, Given, SharedMemory
from mllm_compile.transfer.shared_memory import drop_cuda_reader, drop_reader, opened_file, read_into


def key_of(device: torch.device) -> str:
    """The name that handles have for a device: a GPU's UUID, or cpu."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else CPU


@contextmanager
def opened(given: Sequence[Given], device: torch.device) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """The tensors, one by one; each may be used until the end.

    Raises:
        WeightUpdateError: a tensor is beyond its memory, or that is another device's.
        TransferError: memory cannot be opened: its sender is gone.
    """
    with counted(given), ExitStack() as stack:
        memories: dict[CudaMemory | SharedMemory, tuple[int, int]] = {NO_MEMORY: (0, 0)}
        for memory in dict.fromkeys(one.memory for one in given if one.memory != NO_MEMORY):
            memories[memory] = stack.enter_context(
                _opened_cuda(memory, device) if isinstance(memory, CudaMemory) else _file(memory)
            )
        for one in given:
            end, num_bytes = one.begin + one.num_bytes, memories[one.memory][1]
            if end > num_bytes:
                raise WeightUpdateError(f"tensor {one.name[:200]!r} ends at byte {end:,} of memory of {num_bytes:,}")
        yield _tensors(given, memories, device)


@contextmanager
def counted(given: Iterable[Given]) -> Iterator[None]:
    """Tells the senders at the end that their memory is read no more, whatever happens: they wait for it."""
    with ExitStack() as stack:
        for memory in dict.fromkeys(one.memory for one in given):
            if isinstance(memory, SharedMemory):
                if memory.is_counted:
                    stack.callback(drop_reader, memory.name)
            elif memory.counter is not None:
                stack.callback(drop_cuda_reader, *memory.counter)
        yield


def _tensors(
    given: Sequence[Given], memories: dict[CudaMemory | SharedMemory, tuple[int, int]], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    for one in given:
        place = memories[one.memory][0]
        if isinstance(one.memory, SharedMemory) or not one.num_bytes:
            flat = torch.empty(one.num_bytes, dtype=torch.uint8)
            if one.num_bytes:
                read_into(place, one.begin, flat)
        else:
            flat = tensor_at(place + one.begin, one.num_bytes, device)
            if one.begin % one.dtype.itemsize:
                flat = flat.clone()
        yield one.name, flat.view(one.dtype).view(one.shape)


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """The bytes at an address of a GPU, [bytes] uint8, as they are there."""
    return torch.as_tensor(_Bytes(address, num_bytes), device=device)


class _Bytes:
    """Memory as torch takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


@contextmanager
def _file(memory: SharedMemory) -> Iterator[tuple[int, int]]:
    with opened_file(memory.name) as found:
        yield found


@contextmanager
def _opened_cuda(memory: CudaMemory, device: torch.device) -> Iterator[tuple[int, int]]:
    """The address and the bytes of an allocation."""
    if device.type != "cuda":
        raise WeightUpdateError("the handle is of a GPU's memory, and the engine is on a CPU. Send shared memory.")
    try:
        peer = PeerMemory.of_other(memory.handle, device)
    except DeviceError as error:
        raise TransferError(
            f"the memory of a handle cannot be opened ({error}). Its sender is gone, or is this process."
        ) from None
    try:
        where = device_of(peer.address)
        if where != device.index:
            raise WeightUpdateError(f"the handle is of GPU {where}'s memory, and the engine is on {device.index}")
        if memory.event is not None:
            torch.cuda.Event.from_ipc_handle(device, memory.event).wait(torch.cuda.current_stream(device))
        start, num_bytes = allocation_of(peer.address)
        yield peer.address, start + num_bytes - peer.address
    finally:
        torch.cuda.current_stream(device).synchronize()  # what reads it is queued
        peer.give_back(is_own=False)
