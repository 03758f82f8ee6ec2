"""The memory that a rank gives back while its engine sleeps, by tags as vLLM has them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol, get_args

import torch

from mllm_compile.runtime.cuda.chunks import Chunks
from mllm_compile.runtime.device.arena import Arena
from mllm_compile.runtime.device.memory import check_fits

MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)

_FIRST = 0  # version of what no update changes


class Passage(Protocol):
    """The way of chunks from one process to the next, as open descriptors."""

    def give(self, descriptors: Sequence[int]) -> None:
        """Hands chunks over, or gives them back to the device."""

    def take(self) -> list[int]:
        """The chunks that have come, which are the caller's."""


class SleepingMemory:
    """The memory of one rank. On a CPU, which has no arenas, everything stays where it is.

    Used with no step in flight, by one thread at a time.

    Attributes:
        passage: memory that is given back goes here, and what has come here is taken first; None: it goes to the
            device, and comes from there.

    Args:
        weights: of the model, which updates bring anew; None: they stay.
        kept: weights that no update brings, as a draft model's.
        kv_cache: keys, values and states.
    """

    def __init__(
        self, device: torch.device, weights: Arena | None, kept: Sequence[Arena], kv_cache: Sequence[Arena]
    ) -> None:
        self._device = device
        self._weights = [] if weights is None else [weights]
        self._kept, self._kv_cache = list(kept), list(kv_cache)
        self.passage: Passage | None = None

    @property
    def num_bytes(self) -> dict[MemoryTag, int]:
        """Bytes that each tag gives back."""
        return {tag: sum(arena.num_bytes for arena in arenas) for tag, arenas in self._arenas}

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that copies have, asleep or awake."""
        return sum(arena.host_bytes for arena in (*self._kept, *self._weights))

    def check_room(self, tags: Collection[MemoryTag], *, saves: bool, num_ranks: int = 1) -> None:
        """Refuses copies that the host has no memory for: the system would end a process, later. From any thread.

        Args:
            num_ranks: of this host, which are about to take as much each.

        Raises:
            DeviceMemoryError: the host has too little.
        """
        needed = num_ranks * sum(arena.num_bytes - arena.host_bytes for arena in self._saved(tags, saves))
        if needed:
            what = "a copy of sleeping weights needs" if num_ranks == 1 else f"{num_ranks} ranks' copies need"
            remedy = "Free some, or use level 2, which copies none that an update brings."
            check_fits(needed, what, remedy, torch.device("cpu"))

    def prepare(self, tags: Collection[MemoryTag], *, saves: bool) -> None:
        """Does what is slow ahead of `sleep`, once: takes the host's memory for copies. From any thread.

        Raises:
            DeviceMemoryError: the host has too little.
        """
        self.check_room(tags, saves=saves)
        for arena in self._saved(tags, saves):
            arena.prepare_to_save()

    def sleep(self, tags: Collection[MemoryTag], version: int | None) -> None:
        """Gives memory back. Once or often.

        Args:
            version: of the weights, whose copy stays on the host; None: they are dropped, and what it says too.
        """
        self._synchronize()
        chunks = None
        if self.passage is not None:
            Chunks(self.passage.take()).close()  # it came for a wake that has failed
            chunks = Chunks()
        try:
            if "kv_cache" in tags:
                for arena in self._kv_cache:
                    arena.sleep(chunks)
            if "weights" in tags:
                for arena in self._kept:
                    _sleep_saved(arena, _FIRST, chunks)
                for arena in self._weights:
                    if version is None:
                        arena.forget()
                        arena.sleep(chunks)
                    else:
                        _sleep_saved(arena, version, chunks)
            self._empty_cache()
        finally:
            if self.passage is not None and chunks is not None:
                self.passage.give(chunks.take_all())

    def wake(self, tags: Collection[MemoryTag]) -> None:
        """Takes memory again, with what was saved, or zeros. Once or often; each tag wholly or not.

        Raises:
            DeviceMemoryError: there is too little.
        """
        self._empty_cache()
        chunks = None if self.passage is None else Chunks(self.passage.take())
        try:
            for tag, arenas in self._arenas:
                if tag in tags:
                    self._wake_all([arena for arena in arenas if not arena.is_awake], chunks)
            self._synchronize()
        finally:
            if chunks is not None:
                chunks.close()

    def sleep_on(self, tags: Collection[MemoryTag]) -> None:
        """Gives back what `wake` has taken; copies on the host stay."""
        self._synchronize()
        for tag, arenas in self._arenas:
            if tag in tags:
                for arena in arenas:
                    arena.sleep()

    def _saved(self, tags: Collection[MemoryTag], saves: bool) -> list[Arena]:
        """The arenas whose bytes the host gets a copy of."""
        return [*self._kept, *(self._weights if saves else ())] if "weights" in tags else []

    @property
    def _arenas(self) -> tuple[tuple[MemoryTag, list[Arena]], ...]:
        return ("weights", [*self._kept, *self._weights]), ("kv_cache", self._kv_cache)

    def _wake_all(self, arenas: Sequence[Arena], chunks: Chunks | None) -> None:
        try:
            for arena in arenas:
                arena.wake(chunks)
        except BaseException:
            self._synchronize()
            for arena in arenas:
                arena.sleep()
            raise

    def _empty_cache(self) -> None:
        """Gives back what torch keeps for later."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _sleep_saved(arena: Arena, version: int, chunks: Chunks | None) -> None:
    if arena.is_awake:
        arena.save(version)
    arena.sleep(chunks)
