"""The gate in front of an engine's steps and requests: pauses, and updates of its weights.

    running ──pause──▶ pausing (wait: requests end) ──▶ paused ──resume──▶ running
       └─────direct update─────▶ updating ──▶ running, or torn until an update is whole
       └─────sleep─────▶ sleeping ──wake_up──▶ what it was before

EngineCore asks the gate; engine/rollouts/pauses.py moves it. Every change is made under the core's lock.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from typing import Literal, get_args

from mllm_compile.errors import EnginePausedError, MllmError, RequestError, UpdateConflictError, WeightsTornError

PauseMode = Literal["abort", "wait", "keep", "retract"]
EngineState = Literal["running", "pausing", "paused", "updating", "torn", "sleeping"]

_REFUSING = ("abort", "wait")


def as_pause_mode(mode: str) -> PauseMode:
    """
    Raises:
        RequestError: there is no such mode.
    """
    if mode not in get_args(PauseMode):
        raise RequestError(f"mode: expected one of {', '.join(get_args(PauseMode))}, got {mode!r}")
    return mode  # type: ignore[return-value]  # it is one of them


class Gate:
    """
    Attributes:
        is_shut: no step runs.
        drained: told when a pause that waits for requests has none left; None: none waits.
        is_paused: a pause was called and not resumed.
        num_pauses: how many were called.
        sleeping: what is asleep, by engine/rollouts/sleep.py's tags.
    """

    def __init__(self) -> None:
        self.is_shut = False
        self.drained: Future[None] | None = None
        self.sleeping: frozenset[str] = frozenset()
        self.is_paused = False
        self.num_pauses = 0
        self._shut_since_s: float | None = None
        self._refusing: PauseMode | None = None
        self._refuses_asleep = self._is_updating = False
        self._torn: str | None = None
        self._broke_off: str | None = None  # of a pause: why its update has ended without its weights

    @property
    def state(self) -> EngineState:
        """The state, for people and health checks."""
        if self.sleeping:
            return "sleeping"
        if self._torn is not None:
            return "torn"
        if self._is_updating:
            return "updating"
        if self.drained is not None:
            return "pausing"
        return "paused" if self.is_paused else "running"

    @property
    def held_seconds(self) -> float:
        """How long it has been shut."""
        since = self._shut_since_s
        return 0.0 if since is None else time.monotonic() - since

    @property
    def refusal(self) -> MllmError | None:
        """The error for a new request; None: it is taken."""
        if self._refuses_asleep:
            return EnginePausedError(
                f"the engine is asleep ({', '.join(sorted(self.sleeping))}) and takes no requests. Send it again after "
                "wake_up."
            )
        if self._torn is not None and not self.sleeping:
            return self.torn_error()
        if self._refusing is not None:
            return EnginePausedError(
                f"the engine is paused (mode {self._refusing!r}) and takes no requests. Send it again after resume."
            )
        if self._broke_off is not None:
            return EnginePausedError(
                f"the engine is paused, and an update of its weights broke off ({self._broke_off}). Send this request "
                "again after resume, or once another update has begun."
            )
        return None

    def torn_error(self) -> WeightsTornError:
        """The error for all that needs whole weights."""
        return WeightsTornError(
            f"the weights are torn: {self._torn}. Nothing is generated until an update that is not partial is whole."
        )

    def pause(self, mode: PauseMode) -> Future[None] | None:
        """Notes a pause; newcomers are refused from here on, if they are.

        Returns:
            What is told when requests have ended; None: the pause holds them.

        Raises:
            WeightsTornError: it would wait for requests that go on when weights are whole.
        """
        if mode == "wait" and self._torn is not None:
            raise self.torn_error()
        self.is_paused, self._broke_off = True, None
        self.num_pauses += 1
        if mode in _REFUSING:
            self._refusing = mode
        if mode == "wait":
            self.drained = self.drained or Future()
            self._settle()
        elif mode == "abort":
            self._settle()
        else:
            self.drain_is_over(UpdateConflictError(f"the engine was paused by {mode!r} before its requests had ended."))
        return self.drained

    def drain_is_over(self, error: MllmError | None = None) -> None:
        """Tells callers that wait for the end of requests that all have ended, or the `error`."""
        drained, self.drained = self.drained, None
        if drained is not None and error is None:
            drained.set_result(None)
        elif drained is not None:
            drained.set_exception(error)
        self._settle()

    def resume(self) -> None:
        """
        Raises:
            WeightsTornError: the weights are not whole.
            UpdateConflictError: they are being written.
        """
        if self._torn is not None:
            raise self.torn_error()
        if self._is_updating:
            raise UpdateConflictError("a direct update of the weights is open. Finish it or abandon it, then resume.")
        self.let_go()

    def let_go(self) -> None:
        """Ends a pause, whatever else holds steps."""
        self.is_paused, self._refusing, self._broke_off = False, None, None
        self.drain_is_over(UpdateConflictError("the engine was resumed before its requests had ended."))

    def fall_asleep(self, tags: Collection[str], *, refuses: bool) -> None:
        """Notes that these sleep too; no step runs until all are awake.

        Args:
            refuses: new requests are refused; else they wait.
        """
        self.sleeping |= frozenset(tags)
        self._refuses_asleep = self._refuses_asleep or refuses
        self._settle()

    def stay_as(self, sleeping: frozenset[str]) -> None:
        """Notes that nothing fell asleep beside these."""
        self.sleeping = sleeping
        self._refuses_asleep = self._refuses_asleep and bool(sleeping)
        self._settle()

    def wake(self, tags: Collection[str]) -> None:
        """Notes that these are awake; "scheduling" is when all others are."""
        others = self.sleeping - {"scheduling"}
        self.sleeping -= frozenset(tags)
        if others and not self.sleeping - {"scheduling"}:
            self.sleeping = frozenset()
        if not self.sleeping:
            self._refuses_asleep = False
        self._settle()

    def update_begins(self) -> None:
        """Notes that an update is open: a pause has somebody who will end it."""
        self._broke_off = None

    def update_broke_off(self, reason: str) -> None:
        """Notes that an update has ended without its weights. A pause then refuses newcomers, as its caller may be
        gone; what it holds waits on."""
        if self.is_paused:
            self._broke_off = reason

    def begin_writing(self) -> None:
        """Notes that weights are written in place."""
        self._is_updating = True
        self._settle()

    def end_writing(self, torn: str | None) -> None:
        """Notes that weights are whole, or why they are not."""
        self._is_updating, self._torn = False, torn
        if torn is None:
            self._settle()
        else:
            self.drain_is_over(self.torn_error())

    def _settle(self) -> None:
        is_held = self.is_paused and self.drained is None
        self.is_shut = is_held or self._is_updating or self._torn is not None or bool(self.sleeping)
        if not self.is_shut:
            self._shut_since_s = None
        elif self._shut_since_s is None:
            self._shut_since_s = time.monotonic()
