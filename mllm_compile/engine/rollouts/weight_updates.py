"""Updates of an engine's weights: one at a time, checked beside the engine, swapped in between two steps.

A session takes tensors as they come; `runtime/updates` knows their places. What requests and prefixes make of other
weights is live_requests.py's; how a wire or a folder brings tensors is not known here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch

from mllm_compile.engine.core import end_errors
from mllm_compile.engine.core.live_requests import LiveRequests
from mllm_compile.engine.core.loop import EngineCore
from mllm_compile.errors import MllmError, UpdateConflictError, WeightUpdateError
from mllm_compile.runtime.short_repr import typed_repr
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.runtime.updates.places import Vocabulary
from mllm_compile.runtime.updates.ranked import RankedUpdate, Send
from mllm_compile.runtime.updates.session import WeightUpdate

FIRST_VERSION = "default"  # as vLLM and SGLang call it


class Options(TypedDict, total=False):
    """The options of an update; all are off unless they are given.

    Attributes:
        partial: weights that it does not bring stay as they are.
        direct: it is written in place, without a copy beside the weights; no step runs from its first tensor on.
        names: the vocabulary of tensors' names, where a name is one thing in the checkpoint and another in
            Transformers' model.
        keep_prefix_cache: new requests may use what older weights computed of their prompts.
    """

    partial: bool
    direct: bool
    names: Vocabulary | None
    keep_prefix_cache: bool


@dataclass(frozen=True)
class UpdateReport:
    """The result of an update.

    Attributes:
        version: the label of the weights.
        epoch: how many updates there were.
        num_tensors: tensors that came.
        num_unread: those of them that the model has and its program does not read.
        pause_s: seconds during which no step could run.
        is_whole: it was not partial.
    """

    version: str
    epoch: int
    num_tensors: int
    num_unread: int
    pause_s: float
    is_whole: bool


class WeightUpdates:
    """The weights of one engine; any thread may call it.

    Args:
        core: whose steps read them.
        live: the weights, or why they cannot be updated.
        tell_ranks, ask_ranks: as EngineParts has them.

    Attributes:
        version: their label.
        epoch: how many updates there were.
    """

    def __init__(
        self,
        core: EngineCore,
        live: LiveWeights | str,
        tell_ranks: Send | None,
        ask_ranks: Callable[[int], int] | None = None,
    ) -> None:
        self._core, self._tell_ranks, self._ask_ranks = core, tell_ranks, ask_ranks
        self._live: LiveWeights | MllmError = WeightUpdateError(live) if isinstance(live, str) else live
        self._lock = threading.RLock()
        self._swapping = threading.Lock()  # an update is swapped in whole, or abandoned before
        self._open: WeightUpdate | None = None
        self._is_direct = self._keeps_prefixes = False
        self._torn: str | None = None
        self._direct_since: float | None = None  # when steps were held; None: they are not
        self._prefix_epoch = 0
        self.version, self.epoch = FIRST_VERSION, 0

    @property
    def is_open(self) -> bool:
        """True while an update is open."""
        return self._open is not None

    @property
    def device(self) -> torch.device:
        """The device of the weights.

        Raises:
            WeightUpdateError: this engine's weights cannot be updated.
            EngineDeadError: the engine is closed.
        """
        return next(iter(self._held().tensors.values())).device

    @property
    def is_torn(self) -> bool:
        """True if weights are not whole."""
        return self._torn is not None

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Holds updates off, while none is open.

        Raises:
            UpdateConflictError: one is open.
        """
        self._check_none_is_open()  # the thread that feeds one may hold the lock for long
        with self._lock:
            self._check_none_is_open()
            yield

    def check_comes_anew(self) -> None:
        """
        Raises:
            WeightUpdateError: weights that are dropped could not be sent again.
            EngineDeadError: the engine is closed.
        """
        self._held()

    def dropped(self) -> None:
        """Notes that they are gone, until an update is whole; while `at_rest`."""
        self._close("sleep of level 2 dropped them")

    def start(
        self,
        *,
        partial: bool = False,
        direct: bool = False,
        names: Vocabulary | None = None,
        keep_prefix_cache: bool = False,
    ) -> None:
        """Begins an update, with its Options.

        Raises:
            UpdateConflictError: one is open, or weights are asleep.
            WeightsTornError: it is partial, and weights are torn.
            WeightUpdateError: this engine's weights cannot be updated.
            EngineDeadError: the engine is closed or dead.
        """
        with self.at_rest():
            live = self._held()
            self._check_awake()
            if partial and self._torn is not None:
                raise self._core.gate.torn_error()
            self._open = self._begun(live, is_direct=direct, is_partial=partial, names=names)
            self._is_direct, self._keeps_prefixes, self._direct_since = direct, keep_prefix_cache, None
            self._core.move_gate(lambda gate: gate.update_begins())

    def update(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: str | None = None, **options: Unpack[Options]
    ) -> UpdateReport:
        """A whole session; raises what its parts raise. Nothing stays open."""
        with self._lock:
            self.start(**options)
            self.receive(tensors)
            try:
                return self.finish(version)
            except BaseException as error:
                self.abandon(_reason(error))
                raise

    def _begun(self, live: LiveWeights, **options: Any) -> WeightUpdate:
        """A session of all ranks."""
        tell, ask = self._tell_ranks, self._ask_ranks
        if tell is None or ask is None:
            return WeightUpdate(live, **options)

        def send(message: Iterable[memoryview]) -> None:
            parts = list(message)
            self._core.between_steps(lambda: tell(parts))

        def agree(message: Iterable[memoryview]) -> bool:
            parts = list(message)

            def told() -> int:
                tell(parts)
                return ask(1)

            return bool(self._core.between_steps(told))

        return RankedUpdate(live, send, tell, agree, **options)

    def check_announced(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
    ) -> None:
        """Refuses tensors that could not be taken, before anything is received; the update stays open.

        Raises:
            WeightUpdateError: one could not.
            UpdateConflictError: no update is open.
        """
        if not len(names) == len(shapes) == len(dtypes):
            raise WeightUpdateError(
                f"{len(names)} names, {len(shapes)} shapes and {len(dtypes)} types were announced. Announce as many of "
                "each."
            )
        if len(set(names)) < len(names):
            twice = next(name for name in names if list(names).count(name) > 1)
            raise WeightUpdateError(f"tensor {twice!r} was announced twice. Send each tensor once.")
        with self._lock:
            update = self._session()
            for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
                update.check(name, tuple(shape), dtype)

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]], sums: Mapping[str, int] | None = None) -> int:
        """Takes tensors; one that cannot be taken, or a source that fails, ends the update.

        Args:
            tensors: by name. Each may change behind the next one's turn, on the current stream.
            sums: weights/sums.py's of some.

        Returns:
            How many there were.

        Raises:
            WeightUpdateError: one cannot be taken.
            UpdateConflictError: no update is open.
            Exception: the source's.
        """
        with self._lock:
            update, count = self._session(), 0
            try:
                self._hold_steps(update)
                for name, tensor in _pairs(tensors):
                    self._held()
                    update.take(name, tensor, None if sums is None else sums.get(name))
                    count += 1
            except BaseException as error:
                self.abandon(_reason(error))
                raise
            return count

    def receive_delta(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Takes new values [n] of a tensor's numbers at flat indices [n]; as `receive`."""
        with self._lock:
            update = self._session()
            try:
                update.take_delta(name, indices, values)
            except BaseException as error:
                self.abandon(_reason(error))
                raise

    def finish(self, version: str | None = None) -> UpdateReport:
        """Swaps the new weights in behind the step in flight, and publishes their version.

        Args:
            version: their label; None: the number of the update.

        Raises:
            WeightUpdateError: tensors are missing, and the update stays open; or a weight holds NaN or inf, which ends
                it.
            UpdateConflictError: no update is open.
            EngineDeadError: the engine is closed or dead.
        """
        with self._lock:
            update = self._session()
            update.check_complete()
            try:
                self._hold_steps(update)
                update.prepare()
                pause_s = self._core.while_still(lambda requests: self._swap(update, version, requests))
            except BaseException as error:
                self.abandon(_reason(error))
                raise
            self._close(None)
            return UpdateReport(
                self.version, self.epoch, update.num_tensors, update.num_unread, pause_s, not update.is_partial
            )

    def missing(self) -> list[str]:
        """Names of tensors that the open update lacks.

        Raises:
            UpdateConflictError: no update is open.
        """
        with self._lock:
            return self._session().missing()

    def abandon(self, reason: str) -> None:
        """Ends the open update, if there is one, without its weights; a direct one may leave them torn, and a pause
        refuses new requests from here on."""
        with self._lock:
            update = self._open
            if update is not None:
                with self._swapping:
                    self._open = None  # a caller that was interrupted has left its swap behind
                update.drop()
                self._core.move_gate(lambda gate: gate.update_broke_off(reason))
                whole = None if update.is_whole else self._torn
                self._close(f"an update broke off ({reason})" if update.is_torn else whole)

    def label(self, version: str) -> None:
        """Gives the weights of now another label.

        Raises:
            EngineDeadError: the engine is closed or dead.
        """
        with self._lock:
            self._core.while_still(lambda requests: self._publish(requests, version))

    def sums(self) -> dict[str, int]:
        """A 64-bit sum of each weight's bytes, by the program's names.

        Raises:
            WeightUpdateError: this engine's weights cannot be looked at.
            UpdateConflictError: they are asleep.
            EngineDeadError: the engine is closed or dead.
        """
        live = self._held()

        def of_live(requests: LiveRequests) -> dict[str, int]:
            self._check_awake()
            return live.sums()

        return self._core.while_still(of_live)

    def let_go(self) -> None:
        """Holds the weights no longer, as the engine is closed: who still has the engine does not have them.

        An update that is open ends; where another thread feeds it, at its next tensor.
        """
        self._live = end_errors.closed()
        if self._lock.acquire(blocking=False):
            try:
                self.abandon("the engine is closed")
            finally:
                self._lock.release()

    # ------------------------------------------------------------------------------------------------------------------

    def _held(self) -> LiveWeights:
        live = self._live
        if isinstance(live, MllmError):
            raise live.with_traceback(None)
        return live

    def _check_none_is_open(self) -> None:
        if self._open is not None:
            raise UpdateConflictError("an update of the weights is open. Finish it or abandon it first.")

    def _check_awake(self) -> None:
        if "weights" in self._core.gate.sleeping:
            raise UpdateConflictError("the weights are asleep. Call wake_up(tags=['weights']) first.")

    def _hold_steps(self, update: WeightUpdate) -> None:
        """Holds steps from here on, if the update is direct: it begins to write when none reads weights.

        Steps run while a trainer's memory is opened, ahead of the first tensor.
        """
        if not self._is_direct or self._direct_since is not None:
            return
        self._direct_since = time.monotonic()
        self._core.move_gate(lambda gate: gate.begin_writing())
        self._core.while_still(lambda requests: None)
        update.begin_writing()

    def _session(self) -> WeightUpdate:
        if self._open is None:
            raise UpdateConflictError("no update of the weights is open. Start one first.")
        return self._open

    def _swap(self, update: WeightUpdate, version: str | None, requests: LiveRequests) -> float:
        """On the engine's thread, with no step in flight."""
        with self._swapping:
            if self._open is not update:
                raise UpdateConflictError("the update was abandoned before it was swapped in.")
            began = time.monotonic() if self._direct_since is None else self._direct_since
            update.swap()
            self.epoch += 1
            if not self._keeps_prefixes:
                self._prefix_epoch = self.epoch
            requests.weights_changed(self._prefix_epoch)
            self._publish(requests, str(self.epoch) if version is None else version)
            return time.monotonic() - began

    def _publish(self, requests: LiveRequests, version: str) -> None:
        requests.label(version, self.version)
        self.version = version

    def _close(self, torn: str | None) -> None:
        """Ends the session; `torn`: why weights are neither the old ones nor new ones."""
        if self._is_direct or torn != self._torn:
            self._core.move_gate(lambda gate: gate.end_writing(torn))
        self._open, self._torn = None, torn


def _pairs(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Raises:
        WeightUpdateError: they are anything else.
    """
    expected = "weights: expected pairs of a name and a tensor"
    if isinstance(tensors, Mapping):
        raise WeightUpdateError(f"{expected}, got a {type(tensors).__name__}. Give its items().")
    if isinstance(tensors, str) or not isinstance(tensors, Iterable):
        raise WeightUpdateError(f"{expected}, got {typed_repr(tensors)}. update_weights_from_folder takes a folder.")
    for pair in tensors:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise WeightUpdateError(f"{expected}, got {typed_repr(pair)} among them.")
        yield pair[0], pair[1]


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
