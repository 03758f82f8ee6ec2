"""The communicator of a rank's device, gloo on a CPU, NCCL on a GPU, and the way to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from mllm_compile.ranks.start import Meeting
from mllm_compile.runtime.collectives.base import Communicator
from mllm_compile.runtime.collectives.gloo import GlooCommunicator
from mllm_compile.runtime.collectives.nccl import NcclCommunicator, new_group_id
from mllm_compile.runtime.collectives.stages import StagedCommunicator
from mllm_compile.runtime.errors import DeviceError


def device_of_rank(first: str, rank: int) -> str:
    """The device of a rank: rank 0 has `first`, the others the GPUs behind it; cpu is all ranks'."""
    kind, _, index = first.partition(":")
    return first if kind == "cpu" else f"{kind}:{int(index or 0) + rank}"


def new_meeting_id(device: str) -> str | None:
    """Makes what the ranks of a new group have in common, as Meeting has it."""
    return None if device == "cpu" else new_group_id().hex()


def join(meeting: Meeting, place: int | None) -> Communicator:
    """Joins a group; waits for all ranks.

    Args:
        place: the open descriptor that belongs to the meeting, which is given up with the communicator; None of
            another host than rank 0's.

    Raises:
        DeviceError, RuntimeError: another one ended meanwhile, or there is no way to it.
    """
    whole: GlooCommunicator | NcclCommunicator
    if meeting.nccl_id is None:
        meets_at = place if meeting.store is None else meeting.store
        if meets_at is None:
            raise DeviceError(f"rank {meeting.rank} was told of no place to meet the others")
        if place is not None and meeting.store is not None:
            os.close(place)
        whole = GlooCommunicator(meeting.rank, meeting.size, meets_at, meeting.host or "127.0.0.1")
    else:
        if place is not None:
            os.close(place)
        group_id, device = bytes.fromhex(meeting.nccl_id), torch.device(meeting.device)
        whole = NcclCommunicator(meeting.rank, meeting.size, group_id, device)
    return whole if meeting.num_stages == 1 else StagedCommunicator(whole, meeting.num_stages)


class Joining:
    """A rank's way into its group, in a thread of its own: it loads meanwhile."""

    def __init__(self, join: Callable[[], Communicator]) -> None:
        self._joined: Future[Communicator] = Future()
        self._lock = threading.Lock()  # held by the thread that closes the communicator
        self._is_left = False
        # Ended with the process: where another rank was lost amid it, it may wait for ever.
        threading.Thread(target=self._run, args=(join,), name="join ranks", daemon=True).start()

    def _run(self, join: Callable[[], Communicator]) -> None:
        try:
            communicator = join()
        except BaseException as error:  # raised where the result is asked for
            self._joined.set_exception(error)
            return
        with self._lock:
            if not self._is_left:
                self._joined.set_result(communicator)
                return
        communicator.close()
        self._joined.set_exception(DeviceError("the group was left before all ranks had joined it"))

    def leave(self) -> None:
        """Closes the communicator, once or often; of a rank that joins still, it is closed as soon as it is there."""
        with self._lock:
            self._is_left = True
        if (communicator := self.joined()) is not None:
            communicator.close()

    def is_over(self, within_s: float) -> bool:
        """Waits so long; False: it joins still."""
        return not wait([self._joined], within_s).not_done

    def joined(self) -> Communicator | None:
        """The communicator; None: it joins still, or could not."""
        return self._joined.result() if self._joined.done() and self._joined.exception() is None else None

    def result(self) -> Communicator:
        """Waits.

        Raises:
            DeviceError, RuntimeError: as `join`.
        """
        return self._joined.result()
