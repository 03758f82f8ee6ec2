"""A communicator over NCCL: ranks are processes with a GPU each.

By ctypes, as torch has no public calls that are queued on the current stream, may be captured, and can be ended by
another thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache

import torch

from mllm_compile.runtime.collectives import base
from mllm_compile.runtime.collectives.base import Communicator
from mllm_compile.runtime.collectives.choose import TokenChoice, choice_bytes
from mllm_compile.runtime.collectives.copied import CopiedSums, copied_bytes
from mllm_compile.runtime.collectives.gpu_numbers import gpu_number
from mllm_compile.runtime.collectives.lanes import InOrder, Lane
from mllm_compile.runtime.collectives.nccl_library import (
    ID_BYTES,
    NO_PART,
    SUM,
    TYPES,
    UniqueId,
    check,
    end_beside,
    library,
)
from mllm_compile.runtime.collectives.push import (
    NOTHING,
    PushedSums,
    SentSums,
    add_and_norm,
    buffer_bytes,
    sent_bytes,
)
from mllm_compile.runtime.collectives.sum_kernels import (
    MOST_RANKS,
    ChooseKernel,
    PushKernel,
    PushNormKernel,
    most_copied_bytes,
)
from mllm_compile.runtime.cuda.driver import PeerMemory
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.errors import DeviceError

# Connections are made at the start, as a capture cannot make them. Buffers of graphs are not registered: for thousands
# of captured sums that takes longer than it saves. A group of a few GPUs needs no multicast objects.
_SETTINGS = {"NCCL_RUNTIME_CONNECT": "0", "NCCL_GRAPH_REGISTER": "0", "NCCL_NVLS_ENABLE": "0"}


@cache
def _settled() -> ctypes.CDLL:
    """NCCL with these settings, if it is not in use yet."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    return library()


def new_group_id() -> bytes:
    """The bytes that the ranks of a new group have in common; made by one, given to all."""
    made = UniqueId()
    check(_settled().ncclGetUniqueId(ctypes.byref(made)), "a new group's id")
    return ctypes.string_at(ctypes.byref(made), ID_BYTES)


class NcclCommunicator:
    """One rank of a group; its tensors are contiguous and on its device."""

    def __init__(self, rank: int, size: int, group_id: bytes, device: torch.device) -> None:
        """Waits for the others.

        Raises:
            DeviceError: NCCL cannot be loaded, or connects no GPUs.
        """
        handle, shared = ctypes.c_void_p(), UniqueId()
        ctypes.memmove(ctypes.byref(shared), group_id, ID_BYTES)
        with torch.cuda.device(device):
            check(_settled().ncclCommInitRank(ctypes.byref(handle), size, shared, rank), "joining a group")
        self._take(handle, rank, size, device)

    def _take(self, handle: ctypes.c_void_p, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._device = device
        self._handle: ctypes.c_void_p | None = handle
        self._lock = threading.Lock()  # of giving the handle up
        self._in_one_order = False
        self._pushed: PushedSums | None = None
        self._sent: SentSums | None = None
        self._choice: TokenChoice | None = None
        self._copied: list[CopiedSums] = []
        self._kernels: frozenset[CudaKernel] = frozenset()  # the runtime's, which all ranks have
        self._seen: list[
            tuple[bool, PeerMemory]
        ] = []  # what sums store into and load from, and whether it is this rank's

    def use_kernels(self, kernels: Collection[CudaKernel], in_one_order: bool = False) -> None:
        self._kernels = frozenset(kernels)
        self._in_one_order = in_one_order and self.size > 2  # two numbers have one sum
        if self.size > MOST_RANKS or not self.least(self._sees_all() and PushKernel() in self._kernels):
            return
        places = self._shared(buffer_bytes(self.size), NOTHING)
        self._pushed = PushedSums(self.rank, places, self._device, takes_all=self._in_one_order)
        if sent_bytes(self.size):
            self._sent = SentSums(self.rank, self._shared(sent_bytes(self.size), 0), self._device)
        if any(isinstance(kernel, ChooseKernel) for kernel in self._kernels):
            self._choice = TokenChoice(self.rank, self._shared(choice_bytes(self.size), 0), self._device)

    def part(self, name: str, ranks: Sequence[int]) -> NcclCommunicator | None:
        handle, is_in = ctypes.c_void_p(), self.rank in ranks
        place = list(ranks).index(self.rank) if is_in else 0
        with torch.cuda.device(self._device):
            made = library().ncclCommSplit(self._open(), 0 if is_in else NO_PART, place, ctypes.byref(handle), None)
        check(made, f"making a group of {name}")
        if not is_in:
            return None
        part = NcclCommunicator.__new__(NcclCommunicator)
        part._take(handle, place, len(ranks), self._device)
        return part

    def link(self) -> NcclLink:
        return NcclLink(self, self._device)

    def lanes(self, count: int, most_bytes: int) -> list[Communicator]:
        in_order = InOrder(self._device)
        most = min(most_bytes, most_copied_bytes(self.size))
        if not most or self._sent is None:  # GPUs do not see each other, or there are no kernels
            return [Lane(self, in_order, None, self._kernels) for _ in range(count)]
        num_bytes = copied_bytes(self.size, most)
        copied = [CopiedSums(self.rank, self._shared(num_bytes, 0), self._device, most) for _ in range(count)]
        self._copied += copied
        return [Lane(self, in_order, one, self._kernels) for one in copied]

    def _shared(self, num_bytes: int, word: int) -> list[int]:
        """The addresses of memory that each rank has made for all, filled with a word."""
        own = PeerMemory.new(num_bytes, word, self._device)
        handle = torch.frombuffer(bytearray(own.handle), dtype=torch.uint8).to(self._device)
        handles = self.all_gather(handle).cpu()
        seen = [
            own if rank == self.rank else PeerMemory.of_other(bytes(handles[rank].tolist()), self._device)
            for rank in range(self.size)
        ]
        self._seen += [(rank == self.rank, memory) for rank, memory in enumerate(seen)]
        self.least(0)  # nobody sends before all have emptied theirs
        return [memory.address for memory in seen]

    def _sees_all(self) -> bool:
        """True if this GPU may write into the memory of all other ranks' GPUs. All ranks ask."""
        visible = {gpu_number(index): index for index in range(torch.cuda.device_count())}
        own = self._device.index or 0
        numbers = self.all_gather(torch.tensor([gpu_number(own)], device=self._device)).flatten().tolist()
        others = [visible.get(number) for rank, number in enumerate(numbers) if rank != self.rank]
        return all(other is not None and torch.cuda.can_device_access_peer(own, other) for other in others)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        for sums in (self._pushed, self._sent):
            if sums is not None and sums.takes(x):
                self._open()  # raises where it was given up
                return sums.sum(x)
        if self._in_one_order:
            return base.sum_by_gather(self, x)
        total = torch.empty_like(x)
        if x.numel():
            kind = TYPES[x.dtype]
            arguments = (x.data_ptr(), total.data_ptr(), x.numel(), kind, SUM, self._open(), self._stream())
            check(library().ncclAllReduce(*arguments), "a sum over ranks")
        return total

    def all_reduce_residual_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for sums in (self._pushed, self._sent):
            if sums is not None and sums.takes(x):
                self._open()
                return sums.sum_and_norm(x, residual, weight, eps)
        total = self.all_reduce(x)
        is_ours = total.numel() and PushNormKernel(total.shape[1]) in self._kernels
        return (add_and_norm if is_ours else base.add_and_norm)(total, residual, weight, eps)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel():
            arguments = (x.data_ptr(), gathered.data_ptr(), x.nbytes, TYPES[torch.uint8], self._open(), self._stream())
            check(library().ncclAllGather(*arguments), "a gather over ranks")
        return gathered

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        part = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        if part.numel():
            places, kind = (x.data_ptr(), part.data_ptr(), part.numel()), TYPES[x.dtype]
            check(library().ncclReduceScatter(*places, kind, SUM, self._open(), self._stream()), "sums of ranks' parts")
        return part

    def choose(self, rank_logits: torch.Tensor) -> torch.Tensor:
        if (
            self._choice is not None
            and ChooseKernel(rank_logits.shape[1]) in self._kernels
            and self._choice.takes(rank_logits)
        ):
            self._open()
            return self._choice.choose(rank_logits)
        return base.choose_by_gather(self, rank_logits)

    def choice(self, columns: int) -> TokenChoice | None:
        return self._choice if ChooseKernel(columns) in self._kernels else None

    def broadcast(self, x: torch.Tensor) -> None:
        place = x.data_ptr()
        arguments = (place, place, x.nbytes, TYPES[torch.uint8], 0, self._open(), self._stream())
        check(library().ncclBroadcast(*arguments), "a broadcast to ranks")

    def least(self, value: int) -> int:
        own = torch.tensor([value], device=self._device)
        return int(self.all_gather(own).amin())

    def abort(self) -> None:
        for waiting in (self._pushed, self._sent, self._choice):
            if waiting is not None:
                waiting.give_up()
        with suppress(DeviceError):  # of a device that does not answer any more
            for copied in self._copied:
                copied.give_up()
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            end_beside(handle)

    def close(self) -> None:
        self.abort()  # destroying it would wait for the others, which may be gone
        seen, self._seen = self._seen, []
        self._pushed, self._sent, self._choice, self._copied = None, None, None, []
        with suppress(RuntimeError, DeviceError):  # of a device that does not answer any more
            torch.cuda.synchronize(self._device)
            for is_own, memory in seen:
                memory.give_back(is_own=is_own)

    def _open(self) -> ctypes.c_void_p:
        handle = self._handle
        if handle is None:
            raise DeviceError("the ranks' group was given up: another rank has ended")
        return handle

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


class NcclLink:
    """The way from the first rank of a group of two to the second. What is sent goes on a stream of its own: the next
    step of this rank does not wait until the other has taken it."""

    def __init__(self, group: NcclCommunicator, device: torch.device) -> None:
        """Waits for the other rank."""
        self._group, self._other = group, 1 - group.rank
        self._stream = torch.cuda.Stream(device)
        self._sent: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        # The first call connects the two, and waits in it for the other's. Amid a step that one may come much later.
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        (self.send if group.rank == 0 else self.receive)(first)
        torch.cuda.synchronize(device)

    def send(self, x: torch.Tensor) -> None:
        while self._sent and self._sent[0][0].query():
            self._sent.popleft()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        arguments = (x.data_ptr(), x.nbytes, TYPES[torch.uint8], self._other, self._group._open())
        check(library().ncclSend(*arguments, self._stream.cuda_stream), "sending a value")
        self._sent.append((self._stream.record_event(), x))

    def receive(self, x: torch.Tensor) -> None:
        arguments = (x.data_ptr(), x.nbytes, TYPES[torch.uint8], self._other, self._group._open())
        check(library().ncclRecv(*arguments, self._group._stream()), "receiving a value")
