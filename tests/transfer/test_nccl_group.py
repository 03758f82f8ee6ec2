"""A group over NCCL whose library is a fake: no call waits beyond its time, and what fails is told."""

from __future__ import annotations

import ctypes
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.errors import TransferError, WeightUpdateError
from mllm_compile.runtime.collectives import nccl_library
from mllm_compile.runtime.collectives.nccl_library import IN_PROGRESS, UniqueId
from mllm_compile.transfer import nccl_group
from mllm_compile.transfer.nccl_group import NcclGroup, id_in
from tests.hang_guard import HANG_S, until

ID = bytes(range(128))


class Library:
    """NCCL that answers `result` to each call, and `states` one after the other when it is asked how that goes."""

    def __init__(self) -> None:
        self.result, self.states, self.calls = 0, [0], list[str]()
        self.joined: tuple[int, int, bytes, int] | None = None

    def ncclCommInitRankConfig(self, handle, size, shared, rank, config) -> int:
        self.joined = size, rank, bytes(shared), config._obj.blocking
        return self.result

    def ncclCommGetAsyncError(self, handle, state) -> int:
        state._obj.value = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return 0

    def __getattr__(self, name: str):
        def call(*arguments) -> int:
            self.calls.append(name)
            return self.result

        return call

    def ncclGetErrorString(self, result: int) -> bytes:
        return b"a fault"


@pytest.fixture
def library(monkeypatch):
    fake, done = Library(), SimpleNamespace(is_done=True)
    for module in (nccl_group, nccl_library):
        monkeypatch.setattr(module, "library", lambda: fake)
    stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None, synchronize=lambda: None)
    event = SimpleNamespace(record=lambda stream: None, query=lambda: done.is_done)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    fake.done = done
    return fake


def group_of(library: Library, silence_s: float = 60.0, timeout_s: float = 60.0) -> NcclGroup:
    return NcclGroup(lambda: ID, 1, 2, torch.device("cpu"), timeout_s, silence_s)


def test_a_group_is_joined_without_waiting_inside_of_nccl(library):
    library.result, library.states = IN_PROGRESS, [IN_PROGRESS, IN_PROGRESS, 0]
    group = group_of(library)
    group.begin(torch.zeros(4))()
    assert library.joined == (2, 1, ID, 0)
    assert library.calls == ["ncclBroadcast"]
    group.begin(torch.zeros(0))()
    assert library.calls == ["ncclBroadcast"]  # nobody sends nothing
    group.add_one()
    assert library.calls == ["ncclBroadcast", "ncclAllReduce"]


def test_members_that_do_not_come_end_the_group(library):
    library.result, library.states = IN_PROGRESS, [IN_PROGRESS]
    with pytest.raises(TransferError, match="not all of 2 members have come"):
        group_of(library, timeout_s=0.01).join()
    until(lambda: library.calls == ["ncclCommAbort"], "it is given up")


def test_a_fault_is_told(library):
    library.result = 5
    with pytest.raises(TransferError, match=r"'a fault' \(5\) to joining a trainer's group"):
        group_of(library).join()


@pytest.mark.parametrize("state", [0, 6])
def test_a_sender_that_is_silent_or_gone_ends_the_group(library, state):
    group = group_of(library, silence_s=0.01 if state == 0 else 60.0)
    group.join()
    library.done.is_done, library.states = False, [state]
    with pytest.raises(TransferError, match="the sender is gone, or silent"):
        group.begin(torch.zeros(4))()
    until(lambda: "ncclCommAbort" in library.calls, "it is given up")


def test_a_receiver_that_waits_for_the_device_is_freed_when_its_sender_is_silent(library):
    """As a direct update was that waited for all of the device while its next buffer was on the way."""
    aborted = threading.Event()

    def abort(handle) -> int:
        library.done.is_done = True  # the kernel ends, and has brought nothing
        aborted.set()
        return 0

    library.ncclCommAbort, library.done.is_done = abort, False
    group = group_of(library, silence_s=0.01)
    wait = group.begin(torch.zeros(4))
    assert aborted.wait(HANG_S), "nobody else ends it"
    with pytest.raises(TransferError, match="the sender is gone, or silent"):
        wait()
    for late in (lambda: group.begin(torch.zeros(4)), group.join):
        with pytest.raises(TransferError, match="the sender is gone, or silent"):
            late()


def test_what_nccl_may_write_to_stays_until_the_group_has_ended(library):
    may_end, ended = threading.Event(), threading.Event()

    def abort(handle) -> int:
        assert may_end.wait(HANG_S)
        return 0

    library.ncclCommAbort = abort
    group, begun, over = group_of(library), torch.zeros(4), torch.zeros(4)
    of_begun, of_over = weakref.ref(begun), weakref.ref(over)
    weakref.finalize(begun, ended.set)
    group.begin(over)()
    wait = group.begin(begun)
    del over, begun
    assert of_over() is None, "what has come is its caller's"
    group.close()  # as where a tensor that came before is refused
    del wait
    assert of_begun() is not None, "another tensor would have its memory"
    may_end.set()
    assert ended.wait(HANG_S)


def test_a_trainer_that_does_not_begin_its_group_is_told(library):
    def find_id() -> bytes:
        raise torch.distributed.DistStoreError("wait timeout after 300000ms, keys: /0")

    group = group_of(library)
    group._find_id = find_id
    with pytest.raises(TransferError, match=r"has not begun its group within 60 s \(wait timeout"):
        group.join()


def test_an_id_is_what_vllms_pickle_holds(monkeypatch):
    named = type("ncclUniqueId", (UniqueId,), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "ncclUniqueId", named, raising=False)
    made = named.from_buffer_copy(ID)
    assert id_in(pickle.dumps(made)) == ID
    for other in (named, [made], {}, 5):
        assert id_in(pickle.dumps(other)) == b""
    with pytest.raises(WeightUpdateError, match="which it does not need"):
        id_in(pickle.dumps(ctypes.c_int(5)))


_EXITING = """
import ctypes, sys, threading
from types import SimpleNamespace

from mllm_compile.runtime.collectives import nccl_library

libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)  # as CUDA ends beneath NCCL
nccl_library.library = lambda: SimpleNamespace(ncclCommAbort=lambda handle: threading.Event().wait())
if sys.argv[1] == "ends":
    nccl_library.end_beside(ctypes.c_void_p(1))
libc.printf(b"told by C ")
print("told by Python", end="")
sys.exit(7)
"""


@pytest.mark.parametrize(("what", "status"), [("ends", 7), ("has none", -signal.SIGABRT)])
def test_a_process_that_exits_amid_the_end_of_a_group_has_its_status_and_output(what, status):
    done = subprocess.run([sys.executable, "-c", _EXITING, what], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == status, done.stderr
    assert "told by Python" in done.stdout and ("told by C" in done.stdout or status < 0)
