"""A group whose follower is lost, hangs or fails before it is ready, or whose end is interrupted."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mllm_compile.errors import ArtifactError, DeviceError, DeviceMemoryError
from mllm_compile.process.timeline import Timeline
from mllm_compile.ranks import communicators, group
from mllm_compile.ranks.follower_link import FollowerLink
from mllm_compile.ranks.group import RankGroup
from mllm_compile.ranks.launch_local import LocalLauncher
from mllm_compile.ranks.nodes import RemoteRank
from mllm_compile.ranks.start import BEAT, HERE, READY, Answer, Lines, SealedLines
from mllm_compile.runtime.collectives import gloo
from mllm_compile.runtime.collectives.gloo import GlooCommunicator
from mllm_compile.runtime.ranks import ring
from mllm_compile.runtime.ranks.sealed import SealedConnection
from tests.hang_guard import HANG_S, until
from tests.ranks.test_early_start import runtime_without_a_config


class Follower:
    """A follower's process that a test plays."""

    pid = -1  # none whose processor time could be read

    def __init__(self, rank: int) -> None:
        self.socket, self._theirs = socket.socketpair()
        self.lines = Lines(self._theirs)
        self.end: str | None = None
        self.is_closed = False

    def has_ended(self) -> bool:
        return self.end is not None

    def end_of(self) -> str:
        return str(self.end)

    def kill(self) -> None:
        self.end = self.end or "was killed"

    def close(self) -> None:
        self.is_closed = True
        self.socket.close()
        self._theirs.close()


class Joined:
    """A communicator that ranks have joined when a test says so."""

    def __init__(self) -> None:
        self.may, self.place, self.is_closed = threading.Event(), -1, False

    def join(self, meeting: Any, place: int) -> Joined:
        self.place = place
        self.may.wait()
        return self

    def abort(self) -> None:
        """There are no calls."""

    def close(self) -> None:
        if not self.is_closed:
            os.close(self.place)
        self.is_closed = True


@pytest.fixture
def joined(monkeypatch) -> Iterator[Joined]:
    joined = Joined()
    monkeypatch.setattr(group, "join", joined.join)
    yield joined
    joined.may.set()


@pytest.fixture
def start(monkeypatch) -> Iterator[Callable[..., Any]]:
    """Makes a group of two ranks, one of them played, or of more."""
    groups: list[RankGroup] = []

    def make(size: int = 2) -> Any:
        groups.append(RankGroup(size, 1, "cpu", LocalLauncher(Follower), Timeline()))  # type: ignore[arg-type]
        return groups[-1], *(follower.process for follower in groups[-1]._followers)

    yield make
    monkeypatch.setattr(group, "_END_S", 0.0)
    for one in groups:
        one.close()


def test_a_rank_that_ends_while_others_join_is_told_when_they_have_joined(start, joined):
    ranks, follower = start()
    follower.lines.send(Answer(HERE))
    until(lambda: joined.place >= 0)
    follower.end = "ended with code 3"
    until(lambda: ranks._failure is not None)
    joined.may.set()
    until(lambda: ranks._joined() is not None)
    with pytest.raises(DeviceError, match=r"rank 1 \(process -1\) ended with code 3"):
        ranks.communicator()  # which has no call that would end


def test_what_joins_still_when_a_group_is_closed_keeps_its_place_and_is_closed_later(start, joined, monkeypatch):
    monkeypatch.setattr(group, "_END_S", 0.01)
    ranks, follower = start()
    follower.lines.send(Answer(HERE))
    until(lambda: joined.place >= 0)
    before = os.readlink(f"/proc/self/fd/{joined.place}")
    assert "mllm-ranks-meet" in before
    ranks.close()
    assert os.readlink(f"/proc/self/fd/{joined.place}") == before, "else torch would write to another file"
    assert not joined.is_closed
    joined.may.set()
    until(lambda: joined.is_closed)
    with pytest.raises(DeviceError, match="left before all ranks had joined"):
        ranks.communicator()


def test_a_communicator_whose_group_is_closed_is_closed_with_it(start, joined):
    ranks, follower = start()
    follower.lines.send(Answer(HERE))
    joined.may.set()
    assert ranks.communicator() is joined
    ranks.close()
    assert joined.is_closed


def test_a_rank_that_never_joins_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(gloo, "_JOIN_TIMEOUT", gloo._JOIN_TIMEOUT / 600)
    place = os.memfd_create("place")
    with pytest.raises(RuntimeError, match="timeout"):
        GlooCommunicator(0, 2, place)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(place)


def test_what_waits_for_followers_gives_its_place_up_where_one_is_lost(start, monkeypatch):
    places: list[int] = []
    dup = os.dup
    monkeypatch.setattr(group.os, "dup", lambda place: places.append(dup(place)) or places[-1])
    ranks, follower = start()
    follower.end = "ended with code 1"
    with pytest.raises(DeviceError, match="ended with code 1"):
        ranks.communicator()
    assert ranks._joining is not None
    until(lambda: ranks._joining.is_over(0.0))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(places[0])


def test_a_rank_that_hangs_before_it_is_ready_is_found(start, joined, monkeypatch):
    monkeypatch.setattr(group, "_SILENT_START_S", 0.3)
    ranks, follower = start()
    follower.lines.send(Answer(HERE))
    joined.may.set()
    ranks.communicator()
    ranks.load(runtime_without_a_config(), num_pages=None)
    with pytest.raises(DeviceError, match=r"rank 1 \(process -1\) has not run for 0.3 s: it hangs"):
        ranks.wait_ready()
    assert follower.end == "was killed"


def test_time_in_which_nobody_looked_is_no_silence():
    follower = FollowerLink(1, Follower(1))  # type: ignore[arg-type]
    beats = np.array([5])
    now = follower.looked
    assert follower.silence(beats, now) == 0.0
    assert follower.silence(beats, now + 0.5) == 0.5
    assert follower.silence(beats, now + 60.5) <= 2.0, "all processes were stopped, perhaps, with their container"
    assert follower.silence(beats + 1, now + 61.0) == 0.0


def test_memory_that_a_rank_lacks_is_told_as_what_a_start_with_fewer_pages_may_mend(start):
    ranks, follower = start()
    follower.lines.send(Answer("error", "CUDA out of memory. Tried to allocate 2 GiB", "OutOfMemoryError"))
    with pytest.raises(DeviceMemoryError, match="rank 1: CUDA out of memory"):
        ranks.wait_ready()
    assert group._error_of("ArtifactError").__name__ == "ArtifactError"
    assert group._error_of("annotations") is group._error_of("RuntimeError") is DeviceError


RESET = "Read error: Connection reset by peer"  # in a call with a rank that was lost


def test_of_a_lost_rank_and_of_those_whose_calls_it_ends_the_lost_one_is_named(start, monkeypatch):
    monkeypatch.setattr(group, "_CAUSE_S", 60.0)
    ranks, first, second, lost = start(4)
    first.lines.send(Answer("error", RESET, "RuntimeError", 2.0))
    second.lines.send(Answer("error", RESET, "RuntimeError", 2.1))
    until(lambda: sum(follower.error is not None for follower in ranks._followers) == 2)
    assert ranks._failure is None
    lost.end = "was ended by signal 9"
    with pytest.raises(DeviceError, match=r"^rank 3 \(process -1\) was ended by signal 9$"):
        ranks.wait_ready()
    assert first.end == second.end == "was killed"


def test_of_several_errors_the_first_is_told_whoever_is_heard_of_first(start):
    ranks, first, second = start(3)
    first.lines.send(Answer("error", RESET, "RuntimeError", 2.0))
    second.lines.send(Answer("error", "CUDA out of memory.", "OutOfMemoryError", 1.9))
    with pytest.raises(DeviceMemoryError, match="rank 2: CUDA out of memory"):
        ranks.wait_ready()


def test_an_error_is_told_where_no_other_rank_has_led_to_it(start, monkeypatch):
    monkeypatch.setattr(group, "_CAUSE_S", 0.1)
    ranks, first, _ = start(3)
    first.lines.send(Answer("error", "no such file", "ArtifactError", 2.0))
    with pytest.raises(ArtifactError, match="rank 1: no such file"):
        ranks.wait_ready()


def test_a_group_that_finds_no_room_for_what_is_shared_holds_nothing_of_it(start, joined, monkeypatch):
    ranks, follower = start()
    follower.lines.send(Answer(HERE))
    joined.may.set()
    ranks.communicator()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(ring.mmap, "mmap", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeviceError, match="ranks cannot share memory: Cannot allocate memory"):
        ranks.load(runtime_without_a_config(), num_pages=None)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_end_that_is_interrupted_is_made_again(start, joined, monkeypatch):
    ranks, follower = start()
    follower.lines.send(Answer(HERE))
    joined.may.set()
    ranks.communicator()
    ranks.load(runtime_without_a_config(), num_pages=None)
    follower.lines.send(Answer(READY))
    ranks.wait_ready()

    def interrupt(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(group, "time", SimpleNamespace(sleep=interrupt, monotonic=group.time.monotonic))
        with pytest.raises(KeyboardInterrupt):
            ranks.close()
    assert not follower.is_closed
    ranks.close()
    assert follower.is_closed
    assert joined.is_closed


@pytest.fixture
def over_nodes(joined, monkeypatch) -> Iterator[tuple[RankGroup, SealedLines, socket.socket]]:
    """A ready group with its one follower on another host, and that one's end of the connection, sealed and plain."""
    ours, theirs = socket.socketpair()
    hello = SimpleNamespace(node=1, rank=1)
    rank = RemoteRank(ours, b"session", hello, "10.0.0.2")  # type: ignore[arg-type]
    nodes = SimpleNamespace(num_local=1, host="127.0.0.1", wait=lambda: {1: rank}, close=lambda: None)
    monkeypatch.setattr(group, "_SILENT_S", HANG_S)
    monkeypatch.setattr(group, "new_store", lambda host: SimpleNamespace(port=1))
    ranks = RankGroup(2, 1, "cpu", LocalLauncher(Follower), Timeline(), nodes)  # type: ignore[arg-type]
    lines = SealedLines(SealedConnection(theirs, b"session", is_rank_0=False))
    lines.send(Answer(HERE))
    joined.may.set()
    ranks.communicator()
    ranks.load(runtime_without_a_config(), num_pages=None)
    lines.send(Answer(READY))
    ranks.wait_ready()
    yield ranks, lines, theirs
    ranks.close()
    theirs.close()


def test_a_rank_of_another_host_that_ends_behind_a_beat_is_not_waited_for(over_nodes, monkeypatch):
    """Its last beat is read by nobody but `close`."""
    ranks, lines, theirs = over_nodes
    end = ranks._ring.end

    def end_behind_a_beat() -> None:
        end()
        with ranks._lock:  # nobody reads meanwhile
            ranks._is_closing = True
            lines.send(Answer(BEAT))
            theirs.shutdown(socket.SHUT_WR)

    num_pauses = 0

    def pause(seconds: float) -> None:
        nonlocal num_pauses
        num_pauses += threading.current_thread() is threading.main_thread()
        assert num_pauses < 10
        time.sleep(seconds)

    monkeypatch.setattr(ranks._ring, "end", end_behind_a_beat)
    with monkeypatch.context() as patch:
        patch.setattr(group, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
        ranks.close()


def test_a_rank_of_another_host_that_hangs_is_named_with_its_node(over_nodes, monkeypatch):
    ranks, *_ = over_nodes
    monkeypatch.setattr(group, "_SILENT_S", 0.2)
    until(lambda: ranks._failure is not None)
    with pytest.raises(DeviceError, match=r"^rank 1 on node 1 \(10\.0\.0\.2\) has not run for 0\.2 s: it hangs"):
        ranks.check()


def test_a_frame_that_no_rank_has_sent_ends_the_group_by_naming_it(over_nodes):
    ranks, lines, theirs = over_nodes
    lines.send(Answer(BEAT))
    theirs.sendall(struct.pack("!QB", 2, 255) + bytes(16) + b"{}")
    until(lambda: ranks._failure is not None)
    with pytest.raises(DeviceError, match=r"^rank 1: frame 3 has another MAC than expected"):
        ranks.check()


def test_a_start_that_is_interrupted_leaves_no_process(start, monkeypatch):
    followers: list[Follower] = []
    monkeypatch.setattr(
        Follower, "__init__", lambda self, rank, init=Follower.__init__: followers.append(self) or init(self, rank)
    )

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(group, "Joining", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert [one.is_closed for one in followers] == [True]
    assert not [thread for thread in threading.enumerate() if thread.name == "ranks"]


def test_a_rank_that_fails_to_join_has_no_communicator():
    def fail() -> Any:
        raise RuntimeError("no way")

    joining = communicators.Joining(fail)
    with pytest.raises(RuntimeError, match="no way"):
        joining.result()
    joining.leave()
    assert joining.joined() is None
