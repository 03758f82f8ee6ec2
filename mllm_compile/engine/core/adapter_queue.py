"""The requests that wait for their adapters, and the loads for them: the engine's thread, and one that reads.

A request of an adapter is scheduled when its adapter is on the device; others run meanwhile. A load takes a slot that
no request uses, between two steps. Another thread reads and checks, and writes to the device beside later steps. A load
that fails ends the requests that wait for it, and nothing of it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mllm_compile.adapters.base_model import BaseModel
from mllm_compile.adapters.peft_folder import Matrices
from mllm_compile.adapters.registry import Adapter, read_again
from mllm_compile.adapters.slots import AdapterSlots
from mllm_compile.engine.sequences import Sequence, Submission
from mllm_compile.engine.stats import AdapterStats
from mllm_compile.errors import CheckpointError, MllmError, UnsupportedModelError
from mllm_compile.runtime.short_repr import short_repr

logger = logging.getLogger("mllm_compile.engine")


class AdapterGoneError(CheckpointError):
    """The folder of a loaded adapter has lost it: it is not there any more, is damaged, or holds another one."""


class AdapterWriter(Protocol):
    """The device's side of adapters."""

    @property
    def num_slots(self) -> int:
        """How many adapters it holds."""

    def prepared(self, matrices: Matrices) -> Matrices:
        """The matrices in memory that they are copied from quickly; on the thread that has read them."""

    def moment(self) -> Any:
        """Behind the steps that were submitted, and ahead of later ones; on the engine's thread."""

    def write(self, slot: int, matrices: Matrices, behind: Any) -> None:
        """Replaces what is in a slot that no step behind that moment reads, and waits until it is there; on any thread.

        Behind an error none may use the slot.
        """

    def tell(self, slot: int, matrices: Matrices) -> None:
        """Has other ranks do so, on the engine's thread."""


class Reserved(NamedTuple):
    """A slot that a load takes, and the moment from which on no step reads it."""

    slot: int
    behind: Any


@dataclass(frozen=True)
class AdapterParts:
    """The model that adapters are of, and the device's side of them."""

    base: BaseModel
    writer: AdapterWriter


class AdapterQueue:
    """Used by the engine's thread alone.

    Args:
        parts: the model and the device.
        post: has the engine's thread run a command; from any thread.
        schedule: hands a request to the scheduler.
        fail: ends a request's prompt with an error.
    """

    def __init__(
        self,
        parts: AdapterParts,
        post: Callable[[Callable[[], None]], None],
        schedule: Callable[[Sequence], None],
        fail: Callable[[Submission, MllmError], None],
    ) -> None:
        self._base, self._writer = parts.base, parts.writer
        self._post, self._schedule, self._fail = post, schedule, fail
        self._slots: AdapterSlots[Adapter, Sequence] = AdapterSlots(parts.writer.num_slots)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="mllm-adapters")
        self._is_closed = False

    # --- requests -----------------------------------------------------------------------------------------------------

    def take(self, adapter: Adapter, sequence: Sequence) -> None:
        """Schedules a request, now or when its adapter is on the device."""
        self._slots.take(adapter, sequence)
        self._settle()

    def leave(self, sequence: Sequence) -> None:
        """Takes note of the end of a request; of one without adapter too."""
        self._slots.leave(sequence)
        self._settle()

    def stats(self) -> AdapterStats:
        """The adapters in use and waited for, by their names."""
        running, waiting = ({one.name for one in found} for found in (self._slots.in_use, self._slots.waited_for))
        return AdapterStats(
            self._writer.num_slots, self._slots.num_waiting, tuple(sorted(running)), tuple(sorted(waiting))
        )

    # --- adapters -----------------------------------------------------------------------------------------------------

    def reserve(self, adapter: Adapter) -> Reserved | None:
        """A slot that the caller writes a new version to, if one is free; `finish` or `give_up` follows.

        None: it is loaded when a request names it.
        """
        slot = self._slots.place(adapter)
        return None if slot is None else Reserved(slot, self._writer.moment())

    def finish(self, slot: int, matrices: Matrices) -> None:
        """The adapter of a slot is written to it.

        Raises:
            Exception: other ranks cannot be told; the slot was given up.
        """
        try:
            self._writer.tell(slot, matrices)
        except Exception:
            self.give_up(slot)
            raise
        self._slots.loaded(slot)
        self._settle()

    def give_up(self, slot: int) -> None:
        """The adapter of a slot could not be written to it."""
        self._slots.failed(slot)
        self._settle()

    def retire(self, adapter: Adapter) -> None:
        """Gives a version's slot back when its last request has ended."""
        self._slots.forget(adapter)
        self._settle()

    def close(self) -> None:
        """Ends the thread that reads; what it reads now is dropped, and nothing is read any more."""
        self._is_closed = True
        self._reader.shutdown(wait=False, cancel_futures=True)

    # --- loads --------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Schedules what was granted, and starts loads; either may free or take slots again."""
        while True:
            granted, loads = self._slots.take_granted(), self._slots.take_loads()
            for adapter, slot in () if self._is_closed else loads:
                self._reader.submit(self._load, adapter, Reserved(slot, self._writer.moment()))
            for sequence, slot in granted:
                sequence.request.adapter_slot = slot
                self._schedule(sequence)
            if not granted:
                return

    def _load(self, adapter: Adapter, reserved: Reserved) -> None:
        """Reads a version and writes it to the device; on the thread for that."""
        slot, behind = reserved
        try:
            matrices = self._writer.prepared(read_again(self._base, adapter))
            self._writer.write(slot, matrices, behind)
        except Exception as error:
            failure = _failure(adapter, error)
            self._post(lambda: self._failed(slot, failure))
        else:
            self._post(lambda: self._loaded(adapter, slot, matrices))

    def _loaded(self, adapter: Adapter, slot: int, matrices: Matrices) -> None:
        try:
            self._writer.tell(slot, matrices)
        except Exception as error:
            self._failed(slot, _failure(adapter, error))
            return
        self._slots.loaded(slot)
        self._settle()

    def _failed(self, slot: int, failure: MllmError) -> None:
        logger.error("%s", failure)
        for sequence in self._slots.failed(slot):
            if sequence.finish_reason is None:
                self._fail(sequence.submission, failure)
        self._settle()


def _failure(adapter: Adapter, error: Exception) -> MllmError:
    """The error for the requests that waited for a load."""
    message = f"adapter {short_repr(adapter.name)} could not be loaded: {error}"
    if isinstance(error, CheckpointError | UnsupportedModelError):
        return AdapterGoneError(message)
    return type(error)(message) if isinstance(error, MllmError) else MllmError(message)
