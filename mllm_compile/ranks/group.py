"""The followers of an engine: starts them, sees that one has ended or hangs, and ends them all then, and at the end.

A group that has lost a rank, or whose ranks did not all run a step, is of no use any more: `check` says why. Followers
end with this process, however that ends (process/group.py); what they share has no name and goes with them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from mllm_compile import errors
from mllm_compile.errors import DeviceError, MllmError
from mllm_compile.process.timeline import Timeline, process_start
from mllm_compile.ranks.communicators import Joining, device_of_rank, join, new_meeting_id
from mllm_compile.ranks.follower_link import FollowerLink
from mllm_compile.ranks.launch_local import Launcher
from mllm_compile.ranks.nodes import Nodes, RemoteRank
from mllm_compile.ranks.start import HERE, READY, Answer, Meeting, Start
from mllm_compile.runtime.collectives.base import Communicator
from mllm_compile.runtime.collectives.gloo import new_store
from mllm_compile.runtime.device.cpu_threads import usable_cores
from mllm_compile.runtime.ranks.records import StepRecord, most_record_bytes
from mllm_compile.runtime.ranks.ring import RingWriter
from mllm_compile.runtime.ranks.sent_ring import SentRing
from mllm_compile.store.opened import CompiledRuntime

logger = logging.getLogger("mllm_compile.ranks")

_POLL_S = 0.1
_SILENT_S = 3.5  # without a beat or any processor time: it is stopped, or waits for what never comes
_SILENT_START_S = 30.0  # likewise until it has loaded: it may read from a slow disk before it beats
_STEP_S = 60.0  # of a GPU: no step takes so long
_NOTICE_S = 2.0  # after a failed call, until it is known that a rank has ended
_CAUSE_S = 0.5  # after a rank's error, until it is known whether another rank's end has led to it
_END_S = 5.0


class RankGroup:
    """The ranks of one engine; this process is rank 0. Used by one thread, and by its own.

    They meet from the beginning on, beside all else; `load` tells followers what to load, `communicator` waits until
    they have met, `wait_ready` until they have loaded.
    """

    def __init__(
        self,
        num_ranks: int,
        num_stages: int,
        device: str,
        launcher: Launcher,
        timeline: Timeline,
        nodes: Nodes | None = None,
    ) -> None:
        """Starts the followers.

        Args:
            num_ranks: with this one.
            num_stages: of the pipeline that they are.
            device: rank 0's: cpu or cuda:N.
            launcher: starts those of this host; it is closed with the group.
            timeline: gets the stages of all ranks.
            nodes: further hosts, whose ranks come by themselves; None: there are no others.

        Raises:
            DeviceError: as Nodes.wait; or there is no room for processes, or for what they share.
        """
        self.size, self.num_stages, self.device = num_ranks, num_stages, device
        self._timeline = timeline
        self._failure: MllmError | None = None
        self._is_ready = self._is_closing = self._is_closed = False
        self._unlaunched = 0  # steps that the others run, and this rank not yet
        self._waiting_since: float | None = None
        self._told_since: float | None = None  # when the first error was heard of
        self._lock = threading.Lock()  # of what is found out about followers
        self._followers: list[FollowerLink] = []
        self._launcher = launcher
        self._ring: RingWriter | SentRing | None = None
        self._nodes, self._store = nodes, None
        self._joining: Joining | None = None
        self._watcher: threading.Thread | None = None
        self.num_local = self.size if nodes is None else nodes.num_local
        self.threads = max(1, usable_cores() // self.num_local)
        try:
            place = os.memfd_create("mllm-ranks-meet", os.MFD_CLOEXEC)
        except OSError as error:
            raise _no_shared_memory(error) from error
        try:
            for rank in range(1, self.num_local):
                self._followers.append(FollowerLink(rank, self._launcher.start(rank)))
            if nodes is not None:
                with timeline.stage("wait for nodes"):
                    self._followers += [FollowerLink(rank, one) for rank, one in sorted(nodes.wait().items())]
                if device == "cpu":
                    self._store = new_store(nodes.host)
            meeting_id = new_meeting_id(device)
            watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
            watcher.start()
            self._watcher = watcher
            own_meeting = Meeting(0, self.size, num_stages, device, meeting_id, *self._place_of_hosts())
            for follower in self._followers:
                own = device_of_rank(device, follower.rank % self.num_local)
                told = replace(own_meeting, rank=follower.rank, device=own)
                follower.tell(replace(told, host="") if follower.is_remote else told, [place])
            self._joining = Joining(partial(self._join, own_meeting, os.dup(place)))
        except OSError as error:
            self.close()
            raise DeviceError(f"a rank's process cannot be started: {error.strerror}. Set fewer ranks.") from error
        except BaseException:  # also Ctrl-C
            self.close()
            raise
        finally:
            os.close(place)

    @property
    def has_nodes(self) -> bool:
        """True if some ranks are on other hosts."""
        return self._nodes is not None

    def _place_of_hosts(self) -> tuple[str | None, str]:
        """Meeting's store and host."""
        if self._nodes is None:
            return None, "127.0.0.1"
        return None if self._store is None else f"{self._nodes.host}:{self._store.port}", self._nodes.host

    # The start --------------------------------------------------------------------------------------------------------

    def _join(self, meeting: Meeting, place: int) -> Communicator:
        """Joins when all have their devices: until then one may end without a word to the others."""
        try:
            with self._timeline.stage("ranks import"):
                self._wait_for(HERE)
        except BaseException:
            os.close(place)
            raise
        with self._timeline.stage("ranks join"):
            return join(meeting, place)

    def load(self, compiled: CompiledRuntime, num_pages: int | None) -> None:
        """Has the followers load their parts of a runtime.

        Args:
            num_pages: of the KV cache; None: as many as fit on every rank.

        Raises:
            MllmError: one has ended, or there is no room for what they share.
        """
        self.check()
        runtime = compiled.config.runtime
        pages_of_row = -(-runtime.max_model_len // runtime.page_size)
        rows = min(runtime.max_running_requests, runtime.max_num_batched_tokens) * runtime.expert_parallel_size
        num_tokens = runtime.max_num_batched_tokens * runtime.expert_parallel_size
        most_bytes = most_record_bytes(num_tokens, rows, pages_of_row, runtime.expert_parallel_size)
        try:
            own = RingWriter(self.num_local - 1, most_bytes) if self.num_local > 1 else None
        except OSError as error:
            raise _no_shared_memory(error) from error
        config = compiled.config.model_dump(mode="json")
        remote = [one.process.sealed for one in self._followers if isinstance(one.process, RemoteRank)]
        self._ring = SentRing(own, remote, most_bytes) if own is None or remote else own
        folders = str(compiled.folder), str(compiled.weights_root)
        for follower in self._followers:
            place = None if own is None or follower.is_remote else own.place(follower.rank - 1)
            start = Start(*folders, config, num_pages, self.threads, place, most_bytes)
            follower.tell(start, [] if place is None else [place.memory, place.event])

    def communicator(self) -> Communicator:
        """Waits until all have met.

        Raises:
            MllmError: one could not.
            RuntimeError: as `join`.
        """
        if self._joining is None:
            raise RuntimeError("the ranks' group was closed")
        while not self._joining.is_over(_POLL_S / 10):
            self.check()
        self.check()  # a rank that was lost while the last ones joined had no call to abort
        return self._joining.result()

    def wait_ready(self) -> None:
        """Waits until all have loaded and captured what this one has; the timeline then has their stages.

        Raises:
            MllmError: one could not.
        """
        self._wait_for(READY)
        self._is_ready = True
        for follower in self._followers:
            if follower.is_remote:  # another host's clock
                continue
            for answer in follower.news:
                later = answer.began - process_start()
                for name, begin, end in answer.stages:
                    self._timeline.add(f"rank {follower.rank}: {name}", begin + later, end + later, depth=1)

    def _wait_for(self, at: str) -> None:
        while not all(follower.is_at(at) for follower in self._followers):
            self._look()
            self.check()
            if self._is_closing:
                raise DeviceError("the ranks' group was closed")
            time.sleep(_POLL_S / 10)

    def explain(self, error: BaseException) -> BaseException:
        """The reason of an error in a call with others: the end of a rank, if one ended."""
        try:
            self._check_soon()
        except MllmError as reason:
            return reason
        return error

    # Steps ------------------------------------------------------------------------------------------------------------

    def announce(self, record: StepRecord) -> None:
        """Has the followers run a step, which this rank is about to.

        Raises:
            DeviceError: one has ended.
        """
        self.check()
        self._unlaunched += 1
        self._loaded_ring().write(record, self.check)

    def tell(self, message: Iterable[memoryview]) -> None:
        """Sends the followers a message behind the steps that were announced.

        Raises:
            DeviceError: one has ended.
        """
        self.check()
        self._loaded_ring().write_message(message, self.check)

    def wait_taken(self) -> None:
        """Waits until the followers have done all that was told.

        Raises:
            MllmError: one has ended.
        """
        while not self._loaded_ring().is_read:
            self.check()
            time.sleep(_POLL_S / 100)
        self.check()

    def _loaded_ring(self) -> RingWriter | SentRing:
        if self._ring is None:
            raise RuntimeError("followers run steps when they have loaded: call load() first")
        return self._ring

    def launched(self) -> None:
        """Notes that this rank has launched a step that it announced."""
        self._unlaunched -= 1

    def waiting(self, wait: Callable[[], None]) -> None:
        """Calls `wait`, which waits for the device.

        Raises:
            DeviceError: a rank has ended, so that the device's results are void.
        """
        self._waiting_since = time.monotonic()
        try:
            wait()
        finally:
            self._waiting_since = None
        self.check()

    def least(self, value: int) -> int:
        """The least of a number that all ranks give behind a message.

        Raises:
            DeviceError: a rank has ended.
        """
        communicator, found = self.communicator(), list[int]()
        try:
            self.waiting(lambda: found.append(communicator.least(value)))
        except RuntimeError:
            self._check_soon()  # of a broken call the end of a rank is the cause
            raise
        return found[0]

    def check(self) -> None:
        """
        Raises:
            MllmError: a rank has ended, or hangs: which, and why.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def check_after_failure(self) -> None:
        """Says whether a group can go on after a step that failed.

        Raises:
            MllmError: it cannot.
        """
        self._check_soon()
        if self._unlaunched:
            raise DeviceError("rank 0 did not run a step that the others ran, so that they do not agree any more")

    def _check_soon(self) -> None:
        """Waits until the end of a process is seen: a broken call comes first."""
        deadline = time.monotonic() + _NOTICE_S
        while time.monotonic() < deadline:
            self._look()
            self.check()
            time.sleep(_POLL_S / 10)

    # Watching ---------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_closing and self._failure is None:
            self._look()
            time.sleep(_POLL_S)

    def _look(self) -> None:
        with self._lock:
            if self._failure is not None or self._is_closing:
                return
            failure = self._found()
            if failure is None:
                return
            self._failure = failure
        logger.error("%s", failure)
        for follower in self._followers:
            follower.process.kill()
        if (communicator := self._joined()) is not None:
            communicator.abort()

    def _joined(self) -> Communicator | None:
        """The communicator, as soon as it is there."""
        return None if self._joining is None else self._joining.joined()

    def _found(self) -> MllmError | None:
        """The first thing that is wrong, if any is.

        A rank whose call with others fails tells so, and may be heard of ahead of the one that was lost.
        """
        now = time.monotonic()
        told: list[tuple[Answer, int]] = []
        for follower in self._followers:
            has_ended = follower.process.has_ended()
            follower.look()
            if isinstance(self._ring, SentRing) and follower.is_remote and follower.heard:
                self._ring.heard(follower.rank - self.num_local, follower.num_read)
                follower.heard = False
            if follower.error is not None:
                told.append((follower.error, follower.rank))
                continue
            if has_ended:
                return DeviceError(follower.end_of())
            most_s = _SILENT_S if self._is_ready else _SILENT_START_S
            if self._ring is not None and follower.silence(self._ring.beats, now) > most_s:
                return DeviceError(f"{follower.name} has not run for {most_s} s: it hangs")
        if told:
            self._told_since = self._told_since or now
            if len(told) == len(self._followers) or now - self._told_since >= _CAUSE_S:
                first, rank = min(told, key=lambda one: one[0].when)
                return _error_of(first.kind)(f"rank {rank}: {first.error}")
        since = self._waiting_since
        if self.device != "cpu" and since is not None and now - since > _STEP_S:
            return DeviceError(f"the ranks' GPUs have not ended a step for {_STEP_S:.0f} s: one hangs")
        return None

    def close(self) -> None:
        """Ends all followers and gives up what they share; once or often, also after a call that was interrupted."""
        if self._is_closed:
            return
        if self._failure is None and self._is_ready and self._ring is not None and not self._is_closing:
            self._ring.end()
            deadline = time.monotonic() + _END_S
            self._is_closing = True
            while time.monotonic() < deadline and not self._have_ended():
                time.sleep(_POLL_S / 10)
        self._is_closing = True
        if self._joining is not None and self._failure is None:
            self._joining.is_over(_END_S)  # one that nobody joins any more may wait for ever
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for follower in self._followers:
            follower.process.close()
        self._launcher.close()
        if self._joining is not None:
            self._joining.leave()
        if self._ring is not None:
            self._ring.close()
        if self._nodes is not None:
            self._nodes.close()
        self._is_closed = True

    def _have_ended(self) -> bool:
        with self._lock:
            for follower in self._followers:
                follower.look()  # a connection is over when its last words are read
            return all(follower.process.has_ended() for follower in self._followers)


def _error_of(kind: str) -> type[MllmError]:
    """The class of a follower's error of this name; what memory lacked is told as of this rank."""
    if kind == "OutOfMemoryError":  # torch's
        return errors.DeviceMemoryError
    found: type[MllmError] = getattr(errors, kind) if kind in errors.__all__ else DeviceError
    return found


def _no_shared_memory(error: OSError) -> DeviceError:
    return DeviceError(f"ranks cannot share memory: {error.strerror}. Free some, or set fewer ranks.")
