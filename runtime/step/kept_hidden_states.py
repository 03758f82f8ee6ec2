"""The model's hidden states of each request's newest positions, until a drafter has read them.

A row of the table of slots has a ring: position p is at place p modulo its size.
"""

from __future__ import annotations

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.speculation.drafter import DraftedRequest


class KeptHiddenStates:
    """See the module's header.

    Attributes:
        states: [rows, size, n * hidden]; None before the first step.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.states: torch.Tensor | None = None
        self._held: dict[DraftedRequest, tuple[int, int, int]] = {}  # row; the first position, and behind the last

    @property
    def size(self) -> int:
        """Positions of a row."""
        return 0 if self.states is None else self.states.shape[1]

    def make_room(self, like: torch.Tensor, size: int) -> None:
        """Holds at least `size` positions of a row from now on; `like` is [T, n * hidden]."""
        before, old_size = self.states, self.size
        if old_size >= size:
            return
        self.states = like.new_zeros((self._num_rows, size, like.shape[1]))
        if before is not None and self._held:
            ranges = list(self._held.values())
            moved = [_places(row, start, end, old_size) for row, start, end in ranges]
            places = [_places(row, start, end, size) for row, start, end in ranges]
            self._flat()[self._indices(places)] = before.flatten(0, 1)[self._indices(moved)]

    def has(self, request: DraftedRequest, position: int) -> bool:
        """True if the request's states from `position` on are held."""
        held = self._held.get(request)
        return held is not None and held[1] <= position

    def end_of(self, request: DraftedRequest) -> int:
        """The position behind the last that is held; 0: none is."""
        held = self._held.get(request)
        return 0 if held is None else held[2]

    def extend(self, request: DraftedRequest, row: int, start: int, end: int) -> np.ndarray:
        """Holds positions `start` to `end` too, which replace those that were held from `start` on.

        Returns:
            [n] int64: where `write` has to put them. The first may have no place: n ≤ end - start.
        """
        held = self._held.get(request)
        first = start if held is None or held[2] < start else min(held[1], start)
        self._held[request] = row, max(first, end - self.size), end
        return _places(row, max(start, end - self.size), end, self.size)

    def write(self, places: list[np.ndarray], states: torch.Tensor) -> None:
        """Puts states [n, n * hidden] where `extend` said, of one request after another."""
        self._flat()[self._indices(places)] = states

    def read(self, ranges: list[tuple[int, int, int]]) -> torch.Tensor:
        """[T, n * hidden]: states that are held, of (row, first position, behind the last) each."""
        return self._flat()[self._indices([_places(*one, self.size) for one in ranges])]

    def forget(self, request: DraftedRequest) -> None:
        """Holds nothing of a request any more."""
        self._held.pop(request, None)

    def _flat(self) -> torch.Tensor:
        assert self.states is not None, "a step of the model came before"
        return self.states.flatten(0, 1)

    def _indices(self, places: list[np.ndarray]) -> torch.Tensor:
        return upload(np.concatenate(places), self._flat().device)


def _places(row: int, start: int, end: int, size: int) -> np.ndarray:
    return row * size + np.arange(start, end, dtype=np.int64) % size
