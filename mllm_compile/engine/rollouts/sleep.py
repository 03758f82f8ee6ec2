"""Sleep in place: an engine's memory is given back while its process, its graphs and their addresses stay.

The gate knows what sleeps and who waits for it, runtime/device/sleep.py what memory that is. Weights that were dropped
are torn until an update is whole. Any thread may call these, again and again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Literal, TypeVar, get_args

from mllm_compile.engine.core.gate import Gate, PauseMode
from mllm_compile.engine.core.live_requests import LiveRequests
from mllm_compile.engine.core.loop import EngineCore
from mllm_compile.engine.rollouts.pauses import pause
from mllm_compile.engine.rollouts.weight_updates import WeightUpdates
from mllm_compile.errors import DeviceMemoryError, RequestError
from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.runtime.device.ranked_sleep import RankedMemory, Send
from mllm_compile.runtime.device.sleep import MEMORY_TAGS, MemoryTag, Passage, SleepingMemory

logger = logging.getLogger("mllm_compile.engine")

SleepTag = Literal["weights", "kv_cache", "scheduling"]
SLEEP_TAGS: tuple[SleepTag, ...] = get_args(SleepTag)
_LEVELS = (0, 1, 2)
Memory = SleepingMemory | RankedMemory
Message = Iterable[memoryview]
T = TypeVar("T")


class EngineSleep:
    """The sleep of one engine.

    Args:
        memory: what is given back, or why nothing is.
        num_local, tell_ranks, ask_ranks, wait_ranks: as EngineParts has them.
    """

    def __init__(
        self,
        core: EngineCore,
        weights: WeightUpdates,
        memory: SleepingMemory | str,
        num_local: int,
        tell_ranks: Send | None,
        ask_ranks: Callable[[int], int] | None,
        wait_ranks: Callable[[], None],
    ) -> None:
        self._core, self._weights = core, weights
        self._memory: Memory | str = memory
        if tell_ranks is not None and ask_ranks is not None and not isinstance(memory, str):
            agree_still = partial(_agreed, tell_ranks, ask_ranks)
            send, agree = partial(_between_steps, core, tell_ranks), partial(_between_steps, core, agree_still)
            self._memory = RankedMemory(memory, num_local, send, tell_ranks, wait_ranks, agree, agree_still)
        self._lock = threading.Lock()  # of calls that move memory

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's device that level 1 gives back."""
        return 0 if isinstance(self._memory, str) else sum(self._memory.num_bytes.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that copies of this rank's weights have, asleep or awake."""
        return 0 if isinstance(self._memory, str) else self._memory.host_bytes

    def pass_memory_by(self, passage: Passage) -> None:
        """Hands memory that is given back over to other processes, and takes theirs first."""
        if isinstance(self._memory, SleepingMemory):
            self._memory.passage = passage

    def sleep(self, level: int, mode: PauseMode, tags: Collection[str] | None, *, refuses: bool) -> None:
        """See Engine.sleep.

        Args:
            refuses: requests that come are refused; else they wait.
        """
        chosen = _chosen(level, tags)
        memory = self._givable() if chosen else None
        if mode == "wait" and not self._core.gate.sleeping:
            self._drain()
        with self._lock, self._weights.at_rest():
            drops = level == 2 and "weights" in chosen
            if drops:
                self._weights.check_comes_anew()
            version = None if drops or self._weights.is_torn else self._weights.epoch
            before = self._core.gate.sleeping
            self._core.move_gate(lambda gate: gate.fall_asleep(chosen or ("scheduling",), refuses=refuses))
            try:
                if memory is not None:
                    memory.prepare(chosen, saves=version is not None)
            except BaseException:
                self._core.move_gate(lambda gate: gate.stay_as(before))
                raise
            if drops:
                self._weights.dropped()

            def release(requests: LiveRequests) -> None:
                if mode == "abort":
                    requests.abort_all()
                elif mode == "retract":
                    requests.retract()
                if memory is not None:
                    self._give_back(memory, chosen, version, requests)

            self._core.while_still(release)

    def wake_up(self, tags: Collection[str] | None) -> None:
        """See Engine.wake_up."""
        chosen = SLEEP_TAGS if tags is None else _known(tags)
        with self._lock:
            asleep = [tag for tag in MEMORY_TAGS if tag in chosen and tag in self._core.gate.sleeping]
            try:
                self._take(asleep)  # the cache is mapped while weights are copied
            except DeviceMemoryError:
                for tag in asleep:  # what fits alone is awake
                    self._take([tag])
            self._core.move_gate(lambda gate: gate.wake(chosen))

    def _drain(self) -> None:
        """Answers all requests; new ones are refused meanwhile."""
        was_paused, before = self._core.gate.is_paused, self._core.gate.num_pauses

        def let_go(gate: Gate) -> None:
            if not was_paused and gate.num_pauses == before + 1:  # no other call has paused meanwhile
                gate.let_go()

        try:
            pause(self._core, "wait")
        finally:
            self._core.move_gate(let_go)

    def _givable(self) -> Memory:
        if isinstance(self._memory, str):
            raise RequestError(self._memory)
        return self._memory

    def _give_back(
        self, memory: Memory, tags: Collection[MemoryTag], version: int | None, requests: LiveRequests
    ) -> None:
        """On the engine's thread, with no step in flight."""
        began = time.monotonic()
        if "kv_cache" in tags:
            requests.drop_kv()
        memory.sleep(tags, version)
        sizes = ", ".join(f"{tag} {format_bytes(memory.num_bytes[tag])}" for tag in tags)
        logger.info("asleep in %.3f s: %s", time.monotonic() - began, sizes)

    def _take(self, tags: Collection[MemoryTag]) -> None:
        if not tags:
            return
        memory, began = self._givable(), time.monotonic()
        self._core.while_still(lambda requests: memory.wake(tags))
        self._core.move_gate(lambda gate: gate.wake(tags))
        logger.info("%s awake in %.3f s", " and ".join(tags), time.monotonic() - began)


def _between_steps(core: EngineCore, tell: Callable[[Message], T], message: Message) -> T:
    """Sends the other ranks a message from another thread than the engine's."""
    return core.between_steps(lambda: tell(message))


def _agreed(tell_ranks: Send, ask_ranks: Callable[[int], int], message: Message) -> bool:
    tell_ranks(message)
    return bool(ask_ranks(1))


def _chosen(level: int, tags: Collection[str] | None) -> tuple[MemoryTag, ...]:
    """The memory that sleeps."""
    if level not in _LEVELS:
        raise RequestError(f"level: expected 0, 1 or 2, got {level!r}")
    known = SLEEP_TAGS if tags is None else _known(tags)
    return tuple(tag for tag in MEMORY_TAGS if tag in known) if level else ()


def _known(tags: Collection[str]) -> Collection[str]:
    """
    Raises:
        RequestError: the list is empty, or one is unknown.
    """
    unknown = [tag for tag in tags if tag not in SLEEP_TAGS]
    if unknown or not tags or isinstance(tags, str):
        got = repr(tags) if isinstance(tags, str) or not unknown else repr(unknown[0])
        raise RequestError(f"tags: expected a list of {', '.join(SLEEP_TAGS)}, got {got}")
    return tags
