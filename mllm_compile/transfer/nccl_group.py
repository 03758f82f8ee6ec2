"""A group over NCCL that a trainer and this engine join, with GPUs each: no call of it waits beyond its time.

Unlike torch's own, whose watchdog ends the process of a group that a member has left. A receive that goes on holds up
whatever waits for the whole device, and so perhaps the thread that would see that it is late: another thread ends it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from mllm_compile.errors import DeviceError, TransferError
from mllm_compile.runtime.collectives.nccl_library import (
    ID_BYTES,
    IN_PROGRESS,
    SUM,
    TYPES,
    Config,
    UniqueId,
    check,
    end_beside,
    library,
)
from mllm_compile.transfer.opcodes import Made, read_pickle
from mllm_compile.transfer.overdue import Overdue

_LOOKS_S = 0.001  # between looks at a call that goes on
_QUICK_S = 0.00005  # at a broadcast
_HINT = (
    "A trainer on the engine's own GPU sends handles instead; of an engine over several ranks it sets "
    "NCCL_RUNTIME_CONNECT=0"
)


class NcclGroup:
    """A group that is joined with its first collective; used by one thread at a time.

    Args:
        find_id: waits for the bytes that the members have in common.
        timeout_s: for all members to come.
        silence_s: a broadcast that takes so long has failed.
    """

    def __init__(
        self,
        find_id: Callable[[], bytes],
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        silence_s: float,
    ) -> None:
        self.device = device
        self._find_id, self._rank, self._world_size = find_id, rank, world_size
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self._stream = torch.cuda.Stream(device)
        self._handle: ctypes.c_void_p | None = None
        self._is_over = False
        self._lock = threading.Lock()  # of calls with the handle, and of giving it up
        self._overdue = Overdue(self.close, "nccl-silence")
        self._written: dict[int, torch.Tensor] = {}  # what NCCL may write to, by address

    def join(self) -> ctypes.c_void_p:
        """Waits for the others, once.

        Raises:
            TransferError: they do not come, NCCL connects no such GPUs, or the group is over.
        """
        if self._handle is not None:
            return self._handle
        if self._is_over:
            raise self._silent()
        found, handle, shared = self._found_id(), ctypes.c_void_p(), UniqueId()
        if len(found) != ID_BYTES:
            raise TransferError(f"the trainer's id of the group has {len(found)} bytes; expected {ID_BYTES}")
        ctypes.memmove(ctypes.byref(shared), found, ID_BYTES)
        with torch.cuda.device(self.device):
            began = library().ncclCommInitRankConfig(
                ctypes.byref(handle), self._world_size, shared, self._rank, ctypes.byref(Config())
            )
            self._handle = handle
            self._settle(began, "joining a trainer's group", time.monotonic() + self._timeout_s)
        return handle

    def add_one(self) -> None:
        """Sums one float32 over all members, as PyNccl's groups do once they are joined."""
        number = torch.zeros(1, device=self.device)
        place, kind = number.data_ptr(), TYPES[torch.float32]
        self.join()
        self._begin(
            number,
            "a first sum",
            self._timeout_s,
            lambda handle: library().ncclAllReduce(place, place, 1, kind, SUM, handle, self._stream.cuda_stream),
        )()

    def begin(self, tensor: torch.Tensor, src: int = 0) -> Callable[[], None]:
        """Begins to receive what member `src` broadcasts, in the tensor's memory; the result waits for it.

        Raises:
            TransferError: the sender is gone, or silent.
        """
        if not tensor.nbytes:
            return lambda: None
        place, size, kind = tensor.data_ptr(), tensor.nbytes, TYPES[torch.uint8]
        self.join()
        return self._begin(
            tensor,
            "a broadcast",
            self._silence_s,
            lambda handle: library().ncclBroadcast(place, place, size, kind, src, handle, self._stream.cuda_stream),
        )

    def close(self) -> None:
        """Leaves the group, and ends what it does; from any thread, without waiting for the device."""
        with self._lock:
            self._is_over = True
            handle, self._handle = self._handle, None
        self._overdue.stop()
        written, self._written = self._written, {}
        if handle is not None:
            end_beside(handle, partial(_give_back, self._stream, written))

    def _begin(
        self, tensor: torch.Tensor, doing: str, most_s: float, call: Callable[[ctypes.c_void_p], int]
    ) -> Callable[[], None]:
        """Begins a call that writes to a tensor; it has ended `most_s` from now, or the group is over."""
        deadline = time.monotonic() + most_s
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # what used this memory before
        place = self._holding(tensor)
        self._overdue.expect(most_s)
        self._settle(self._called(call), doing, deadline)
        event = torch.cuda.Event()
        event.record(self._stream)
        return lambda: self._wait(event, place)

    def _found_id(self) -> bytes:
        try:
            return self._find_id()
        except (RuntimeError, OSError) as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)[:200]
            raise TransferError(f"the trainer has not begun its group within {self._timeout_s:g} s ({said})") from None

    def _holding(self, tensor: torch.Tensor) -> int:
        """The address of a tensor that stays in memory until nothing writes to it."""
        self._written[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def _settle(self, result: int, doing: str, deadline: float) -> None:
        """Waits until a call has been taken."""
        while result == IN_PROGRESS:
            if time.monotonic() > deadline:
                self.close()
                raise TransferError(f"not all of {self._world_size} members have come to {doing}. {_HINT}")
            time.sleep(_LOOKS_S)
            result = self._state()
        try:
            check(result, doing)
        except DeviceError as error:
            self.close()
            raise TransferError(f"{error}. {_HINT}") from None

    def _wait(self, event: torch.cuda.Event, place: int) -> None:
        while not event.query():
            if self._state() not in (0, IN_PROGRESS):
                self.close()
            time.sleep(_QUICK_S)
        if self._is_over:  # what has ended has not come
            raise self._silent()
        self._overdue.came()
        self._written.pop(place, None)

    def _state(self) -> int:
        state = ctypes.c_int()
        asked = self._called(lambda handle: library().ncclCommGetAsyncError(handle, ctypes.byref(state)))
        check(asked, "asking for a group's state")
        return state.value

    def _called(self, call: Callable[[ctypes.c_void_p], int]) -> int:
        """The result of a call, of those that do not wait: NCCL frees the handle where the group is ended.

        Raises:
            TransferError: the group is over.
        """
        with self._lock:
            if self._handle is None:
                raise self._silent()
            return call(self._handle)

    def _silent(self) -> TransferError:
        return TransferError(f"the sender is gone, or silent for {self._silence_s:g} s")


def id_in(pickled: bytes) -> bytes:
    """The id of a group in vLLM's pickle of it: the bytes that it holds.

    Raises:
        WeightUpdateError: it holds anything else.
    """
    found = read_pickle(pickled, "the trainer's id", lambda name: name.name in ("_unpickle", "ncclUniqueId"))
    _, state = found.arguments if isinstance(found, Made) and len(found.arguments) == 2 else (None, None)
    return next((one for one in state if isinstance(one, bytes)), b"") if isinstance(state, tuple) else b""


def _give_back(stream: torch.cuda.Stream, written: dict[int, torch.Tensor]) -> None:
    """Frees what an ended group was about to write to, when it does so no more."""
    with suppress(RuntimeError):  # of a device that does not answer any more
        stream.synchronize()
    written.clear()
