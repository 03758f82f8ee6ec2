"""The followers of an engine: starts them, sees that one has ended or hangs, and ends them all then, and at the end.

A group that has lost a rank, or whose ranks did not all run a step, is of no use any more: `check` says why. Followers
end with this process, however that ends (process/group.py); what they share has no name and goes with them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from mllm_compile import errors
from mllm_compile.errors import DeviceError, MllmError
from mllm_compile.ranks.ahead import RanksAhead
from mllm_compile.ranks.communicators import meet, new_meeting
from mllm_compile.ranks.launch_local import Launcher, LocalLauncher, RankProcess
from mllm_compile.ranks.start import HERE, READY, Answer, Lines, Start
from mllm_compile.runtime.collectives.base import Communicator
from mllm_compile.runtime.config_sections import RuntimeSection
from mllm_compile.runtime.device.cpu_threads import usable_cores
from mllm_compile.runtime.json_data import from_json, parse_json
from mllm_compile.runtime.ranks.records import StepRecord, most_record_bytes
from mllm_compile.runtime.ranks.ring import RingWriter
from mllm_compile.store.opened import CompiledRuntime

logger = logging.getLogger("mllm_compile.ranks")

_LOOK_S = 0.1
_SILENT_S = 3.5  # without a beat or any processor time: it is stopped, or waits for what never comes
_STEP_S = 60.0  # of a GPU: no step takes so long
_NOTICE_S = 2.0  # after a failed call, until it is known that a rank has ended
_END_S = 5.0


class _Follower:
    """One rank.

    Attributes:
        news: what it has answered so far.
    """

    def __init__(self, process: RankProcess, start: Start) -> None:
        self.rank = start.rank
        self.process = process
        self.news: list[Answer] = []
        self.connection = Lines(process.socket)
        self.connection.send(start)
        self.beat, self.cpu_time, self.moved = -1, -1.0, time.monotonic()

    def look(self) -> None:
        """Takes the news that have come."""
        self.news += [from_json(Answer, parse_json(line)) for line in self.connection.arrived()]

    def is_silent(self, beat: int, now: float) -> bool:
        """True if it has neither beaten nor computed for long."""
        cpu_time = _cpu_time(self.process.pid)
        if beat != self.beat or cpu_time != self.cpu_time:
            self.beat, self.cpu_time, self.moved = beat, cpu_time, now
        return now - self.moved > _SILENT_S

    def end_of(self) -> str:
        """How its process ended, for people."""
        return f"rank {self.rank} (process {self.process.pid}) {self.process.end_of()}"


class RankGroup:
    """The ranks of one engine; this process is rank 0. Used by one thread, and by its own."""

    def __init__(self, compiled: CompiledRuntime, num_pages: int | None, ahead: RanksAhead) -> None:
        """Starts the followers, which load meanwhile.

        Args:
            ahead: processes that were started for it.

        Raises:
            DeviceError: there is no room for processes, or for what they share.
        """
        runtime = compiled.config.runtime
        self.size = runtime.num_ranks
        self._device = runtime.device
        self._failure: MllmError | None = None
        self._is_ready = self._is_closing = self._is_closed = False
        self._in_step = False
        self._waiting_since: float | None = None
        self._lock = threading.Lock()  # of what is found out about followers
        self._communicator: Communicator | None = None
        self._followers: list[_Follower] = []
        self._launcher: Launcher = LocalLauncher(ahead.take)
        self.threads = max(1, usable_cores() // self.size)
        pages_of_row = -(-runtime.max_model_len // runtime.page_size)
        rows = min(runtime.max_running_requests, runtime.max_num_batched_tokens) * runtime.expert_parallel_size
        num_tokens = runtime.max_num_batched_tokens * runtime.expert_parallel_size
        try:
            self._ring = RingWriter(
                self.size - 1, most_record_bytes(num_tokens, rows, pages_of_row, runtime.expert_parallel_size)
            )
            self._meeting_place = os.memfd_create("mllm-ranks-meet", os.MFD_CLOEXEC)
        except OSError as error:
            raise DeviceError(f"ranks cannot share memory: {error.strerror}. Free some, or set fewer ranks.") from error
        try:
            if runtime.distributed_executor_backend == "ray":
                self._launcher = _ray_launcher(runtime)
            for rank in range(1, self.size):
                place = self._ring.place(rank - 1)
                start = Start(
                    str(compiled.folder),
                    str(compiled.weights_root),
                    compiled.config.model_dump(mode="json"),
                    rank,
                    self.size,
                    num_pages,
                    self.threads,
                    place,
                    self._meeting_place,
                )
                self._followers.append(_Follower(self._launcher.start(start), start))
        except MllmError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise DeviceError(f"a rank's process cannot be started: {error.strerror}. Set fewer ranks.") from error
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    # The start --------------------------------------------------------------------------------------------------------

    def connect(self) -> Communicator:
        """Waits until all have their devices, and meets them.

        Raises:
            MllmError: one could not.
        """
        self._wait_for(HERE)
        meeting = new_meeting(self._device)
        for follower in self._followers:
            with suppress(OSError):  # `check` says why
                follower.connection.send(meeting)
        self._communicator = meet(meeting, 0, self.size, torch.device(self._device), self._meeting_place)
        return self._communicator

    def wait_ready(self) -> None:
        """Waits until all have loaded and captured what this one has.

        Raises:
            MllmError: one could not.
        """
        self._wait_for(READY)
        self._is_ready = True

    def _wait_for(self, at: str) -> None:
        while not all(any(answer.at == at for answer in follower.news) for follower in self._followers):
            self.check()
            time.sleep(_LOOK_S / 10)

    def explain(self, error: BaseException) -> BaseException:
        """The reason of an error in a call with others: that of the rank that ended, if one did."""
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
        self._in_step = True
        self._ring.write(record, self.check)

    def launched(self) -> None:
        """Notes that this rank has launched what it announced."""
        self._in_step = False

    def waiting(self, wait: Callable[[], None]) -> None:
        """Calls `wait`, which waits for the device.

        Raises:
            DeviceError: a rank has ended, so that what the device gives is nothing.
        """
        self._waiting_since = time.monotonic()
        try:
            wait()
        finally:
            self._waiting_since = None
        self.check()

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
        if self._in_step:
            raise DeviceError("rank 0 did not run a step that the others ran, so that they do not agree any more")

    def _check_soon(self) -> None:
        """Gives the end of a process, of which a broken call tells first, the time to be seen."""
        deadline = time.monotonic() + _NOTICE_S
        while time.monotonic() < deadline:
            self._look()
            self.check()
            time.sleep(_LOOK_S / 10)

    # Watching ---------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_closing and self._failure is None:
            self._look()
            time.sleep(_LOOK_S)

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
        if self._communicator is not None:
            self._communicator.abort()

    def _found(self) -> MllmError | None:
        """The first thing that is wrong, if any is."""
        now, beats = time.monotonic(), self._ring.beats
        for follower in self._followers:
            has_ended = follower.process.has_ended()
            follower.look()
            told = next((answer for answer in follower.news if answer.error is not None), None)
            if told is not None:
                kind = getattr(errors, told.kind, DeviceError)
                return kind(f"rank {follower.rank}: {told.error}")
            if has_ended:
                return DeviceError(follower.end_of())
            if follower.is_silent(int(beats[follower.rank - 1]), now) and self._is_ready:
                return DeviceError(
                    f"rank {follower.rank} (process {follower.process.pid}) has not run for {_SILENT_S} s: it hangs"
                )
        since = self._waiting_since
        if self._device != "cpu" and since is not None and now - since > _STEP_S:
            return DeviceError(f"the ranks' GPUs have not ended a step for {_STEP_S:.0f} s: one hangs")
        return None

    def close(self) -> None:
        """Ends all followers and gives up what they share; once or often."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._failure is None and self._is_ready:
            self._ring.end()
            deadline = time.monotonic() + _END_S
            self._is_closing = True
            while time.monotonic() < deadline and not all(one.process.has_ended() for one in self._followers):
                time.sleep(_LOOK_S / 10)
        self._is_closing = True
        if hasattr(self, "_watcher") and self._watcher is not threading.current_thread():
            self._watcher.join()
        for follower in self._followers:
            follower.process.close()
        self._launcher.close()
        if self._communicator is not None:
            self._communicator.close()
        self._ring.close()
        os.close(self._meeting_place)


def _cpu_time(process: int) -> float:
    """Ticks of processor time that a process has taken; -1 where it is not there."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return float(fields[11]) + float(fields[12])
    except (OSError, IndexError, ValueError):
        return -1.0


def _ray_launcher(runtime: RuntimeSection) -> Launcher:
    from mllm_compile.ranks.launch_ray import RayLauncher

    return RayLauncher(runtime.num_ranks, runtime.device != "cpu")
