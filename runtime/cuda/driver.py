"""The few calls of the CUDA driver that load and launch a kernel, by ctypes: torch has no public ones for a tensor map,
a cluster or an early launch. And a copy that takes the host little.

Structures and numbers are from cuda.h (CUDA 12 and later; "CUDA Driver API", Execution Control and Tensor Map).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.errors import ArtifactError, DeviceError, DeviceMemoryError

_BYTE, _BFLOAT16, _PROMOTE_128B = 0, 9, 2
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # by the bytes of a box's row
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_…
_SHARED_MEMORY_CARVEOUT = 9
_STARTS_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_OUT_OF_MEMORY = 2  # CUDA_ERROR_…
_AS_LARGE = 0  # CU_STREAM_WAIT_VALUE_GEQ
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_…
_SHARED_PAGE = 2 << 20  # bytes that the driver shares at once
_HANDLE_BYTES, _ENABLE_PEER_ACCESS = 64, 1  # of memory that other processes open


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _driver_within_the_lock() -> ctypes.PyDLL:
    """The same, without giving away the interpreter's lock: for calls that are over before it would be had again."""
    return ctypes.PyDLL("libcuda.so.1")


def _check(result: int, doing: str) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(name))
        kind = DeviceMemoryError if result == _OUT_OF_MEMORY else DeviceError
        raise kind(f"the CUDA driver answers {(name.value or b'?').decode()} ({result}) to {doing}")


@cache
def _context(device: int) -> ctypes.c_void_p:
    """The context that torch uses of `device`, which stays for the process."""
    driver, handle, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuInit(0), "its start")
    _check(driver.cuDeviceGet(ctypes.byref(handle), device), f"looking for device {device}")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"taking the context of device {device}")
    return context


class Axis(NamedTuple):
    """One dimension of a tensor as TMA sees it.

    Attributes:
        size: steps that there are; past them are zeros.
        stride: bytes of a step. Of the first axis it is not told: one element.
        box: steps that a copy takes.
    """

    size: int
    stride: int
    box: int


class TensorMap:
    """TMA's map of boxes in a tensor of bfloat16 or bytes; rows of 32, 64 or 128 bytes are swizzled.

    The L2 is asked for 128 bytes at a time: with 256 reading a KV cache was 5 % slower.

    Raises:
        DeviceError: the driver refuses it.
    """

    def __init__(self, tensor: torch.Tensor, axes: Sequence[Axis]) -> None:
        """
        Args:
            tensor: where it begins.
            axes: at most five, the one of neighbouring elements first.
        """
        self._memory = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
        self.address = -(-ctypes.addressof(self._memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        rank, size = len(axes), tensor.element_size()
        result = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address),
            _BFLOAT16 if size == 2 else _BYTE,
            rank,
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * rank)(*(axis.size for axis in axes)),
            (ctypes.c_uint64 * (rank - 1))(*(axis.stride for axis in axes[1:])),
            (ctypes.c_uint32 * rank)(*(axis.box for axis in axes)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            _SWIZZLES[axes[0].box * size],
            _PROMOTE_128B,
            0,
        )
        _check(result, f"a tensor map of {tuple(tensor.shape)}")


def address_of(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """The tensor's address as a kernel's argument."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def copy_pinned(memory: torch.Tensor, place: torch.Tensor, num_bytes: int) -> None:
    """Copies the first bytes of pinned memory to `place`, on torch's current stream of its device, without waiting.

    torch's own copy takes the host several times as long: it notes for its allocator that the memory is read. The
    caller keeps the memory, and what is in it, until the copy is over.

    Raises:
        DeviceError: the device does not answer.
    """
    device, driver = place.get_device(), _driver()
    _check(driver.cuCtxSetCurrent(_context(device)), f"using the context of device {device}")
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
    source, target = ctypes.c_void_p(memory.data_ptr()), ctypes.c_uint64(place.data_ptr())
    _check(driver.cuMemcpyHtoDAsync_v2(target, source, ctypes.c_size_t(num_bytes), stream), "a copy to the device")


def scatter_pinned(memory: torch.Tensor, targets: Sequence[tuple[int, int]], stream: int, device: int) -> None:
    """Copies stretches of pinned memory, one behind the other, without waiting and without letting another thread in.

    Args:
        memory: the caller keeps it, and what is in it, until the copies are over.
        targets: each stretch's address on the device, and its bytes.
        stream, device: where the copies are queued.

    Raises:
        DeviceError: the device does not answer.
    """
    driver, source = _driver_within_the_lock(), memory.data_ptr()
    _check(driver.cuCtxSetCurrent(_context(device)), f"using the context of device {device}")
    for target, num_bytes in targets:
        copied = driver.cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream)
        )
        _check(copied, f"a copy of {num_bytes} bytes to the device")
        source += num_bytes


Argument = TensorMap | ctypes.c_void_p | ctypes.c_float | ctypes.c_int | ctypes.Array[ctypes.c_int] | ctypes.Structure


def load_kernel(kernel: CudaKernel, binaries: Mapping[str, bytes]) -> Kernel:
    """A kernel of a runtime on the current device.

    Args:
        binaries: binaries by name; checked by the caller: they are executed.

    Raises:
        ArtifactError: the runtime does not hold it.
        DeviceError: it cannot be loaded.
    """
    if kernel.name not in binaries:
        raise ArtifactError(f"the runtime holds no kernel {kernel.name}; compile the model again")
    try:
        return Kernel(binaries[kernel.name], kernel.function, kernel.shared_bytes)
    except DeviceError as error:
        raise DeviceError(f"{error} (the kernel {kernel.name}). Set {kernel.switch} to do without.") from error


class Kernel:
    """A loaded function of a binary, on the current device.

    Raises:
        DeviceError: the binary is not for this GPU, or needs more than it has.
    """

    def __init__(self, binary: bytes, name: str, shared_bytes: int) -> None:
        # A thread that has called no CUDA yet has no context. A thread that launches has one: it made tensors.
        self._device = torch.cuda.current_device()
        _use(self._device)
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._shared_bytes = shared_bytes
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), binary), "loading a kernel")
        found = driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode())
        _check(found, f"looking for {name}")
        for attribute, value in ((_MAX_DYNAMIC_SHARED_BYTES, shared_bytes), (_SHARED_MEMORY_CARVEOUT, 100)):
            _check(
                driver.cuFuncSetAttribute(self._function, attribute, value), f"{shared_bytes} bytes of shared memory"
            )

    def launch(
        self, num_blocks: int, num_threads: int, arguments: Sequence[Argument], starts_early: bool = True
    ) -> None:
        """Launches on torch's current stream of the device it was loaded on.

        Args:
            arguments: values; they are copied.
            starts_early: before the kernel ahead has ended.
        """
        addresses = [
            argument.address if isinstance(argument, TensorMap) else ctypes.addressof(argument)
            for argument in arguments
        ]
        stream = torch._C._cuda_getCurrentRawStream(self._device)  # torch.cuda.current_stream() makes an object of it
        attribute = _Attribute(_STARTS_EARLY, 0, 1)
        config = _LaunchConfig(
            num_blocks, 1, 1, num_threads, 1, 1, self._shared_bytes,
            stream, ctypes.pointer(attribute), int(starts_early),
        )  # fmt: skip
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        result = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        _check(result, "launching a kernel")


def copy_bytes(to: int, source: int, num_bytes: int, stream: int, device: int) -> None:
    """Queues a copy between addresses; between two GPUs it is a copy engine's."""
    _use(device)
    copied = _driver().cuMemcpyAsync(
        ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream)
    )
    _check(copied, f"a copy of {num_bytes} bytes")


def write_word(address: int, word: int, stream: int, device: int) -> None:
    """Queues the writing of a word of 32 bits; from any thread."""
    _use(device)
    arguments = ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(word), ctypes.c_uint(0)
    _check(_driver().cuStreamWriteValue32_v2(*arguments), "writing a word")


def wait_for_word(address: int, word: int, stream: int, device: int) -> None:
    """Queues a wait until the 32 bits at an address are as large as `word`, or larger, in the cyclic order of numbers;
    it holds no multiprocessor."""
    _use(device)
    arguments = ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(word), ctypes.c_uint(_AS_LARGE)
    _check(_driver().cuStreamWaitValue32_v2(*arguments), "waiting for a word")


def call(name: str, device: int, doing: str, *arguments: Any) -> None:
    """Calls a function of the driver in torch's context of `device`; the thread's own device stays current.

    Args:
        doing: what it is for, for errors.

    Raises:
        DeviceMemoryError: there is too little memory.
        DeviceError: the driver refuses it.
    """
    call_each(name, device, doing, (arguments,))


def call_each(name: str, device: int, doing: str, calls: Iterable[tuple[Any, ...]]) -> None:
    """Like `call`, once with each of these arguments."""
    within_the_lock = _driver_within_the_lock()  # a thread that copies would have to wait for it twice more
    _check(within_the_lock.cuCtxPushCurrent_v2(_context(device)), f"using the context of device {device}")
    try:
        function = getattr(_driver(), name)
        for arguments in calls:
            _check(function(*arguments), doing)
    finally:
        within_the_lock.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _use(device: int) -> None:
    _check(_driver().cuCtxSetCurrent(_context(device)), f"using the context of device {device}")


def allocation_of(address: int) -> tuple[int, int]:
    """The beginning and the bytes of the allocation that an address is in.

    Raises:
        DeviceError: it is in none.
    """
    start, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    found = _driver().cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(num_bytes), ctypes.c_uint64(address))
    _check(found, "looking for an allocation")
    return start.value, num_bytes.value


def device_of(address: int) -> int:
    """The number of the GPU whose memory an address is of."""
    number = ctypes.c_int()
    found = _driver().cuPointerGetAttribute(ctypes.byref(number), _DEVICE_ORDINAL, ctypes.c_uint64(address))
    _check(found, "looking for memory's device")
    return number.value


def handle_of(tensor: torch.Tensor) -> tuple[bytes, int]:
    """The handle by which another process opens a tensor's memory, and the tensor's first byte there.

    Raises:
        DeviceError: its memory cannot be shared; that of expandable segments never can.
    """
    handle = _Handle()
    _use(tensor.get_device())
    start, _ = allocation_of(tensor.data_ptr())
    _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(start)), "sharing memory")
    return ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES), tensor.data_ptr() - start


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@dataclass(frozen=True)
class PeerMemory:
    """Memory that several processes' GPUs see (CUDA IPC): this one's own or another's; until it is given back.

    Attributes:
        address: where it begins.
        handle: what another process opens it by.
    """

    address: int
    handle: bytes

    @classmethod
    def new(cls, num_bytes: int, word: int, device: torch.device) -> PeerMemory:
        """Takes memory of `device` and fills it with a word of 32 bits.

        Raises:
            DeviceError: no memory is left, or it cannot be shared.
        """
        address, handle = ctypes.c_uint64(), _Handle()
        num_bytes = -(-num_bytes // _SHARED_PAGE) * _SHARED_PAGE  # of less than a page others would see a neighbour's
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).synchronize()  # makes the context the thread's
            calls = _driver()
            _check(calls.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)), f"{num_bytes} bytes")
            words = ctypes.c_size_t(num_bytes // 4)
            _check(calls.cuMemsetD32_v2(address, ctypes.c_uint(word), words), "filling memory")
            _check(calls.cuCtxSynchronize(), "filling memory")
            _check(calls.cuIpcGetMemHandle(ctypes.byref(handle), address), "sharing memory")
        return cls(address.value, ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES))

    @classmethod
    def of_other(cls, handle: bytes, device: torch.device) -> PeerMemory:
        """Opens another process' memory.

        Raises:
            DeviceError: its GPU is not one that this one reaches.
        """
        address, own = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(own), handle, _HANDLE_BYTES)
        with torch.cuda.device(device):
            _use(torch.cuda.current_device())  # a thread that has called no CUDA yet has no context
            opened = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), own, ctypes.c_uint(_ENABLE_PEER_ACCESS))
            _check(opened, "opening another process' memory")
        return cls(address.value, handle)

    def give_back(self, *, is_own: bool) -> None:
        """Frees it, or closes another process'; nothing may use it any more.

        Raises:
            DeviceError: the device does not answer.
        """
        address, calls = ctypes.c_uint64(self.address), _driver()
        _check(calls.cuMemFree_v2(address) if is_own else calls.cuIpcCloseMemHandle(address), "giving memory back")
