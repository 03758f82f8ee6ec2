"""The weights of a model that serves, as an update sees them: their places, and what loading made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from mllm_compile.runtime.ops.panels.layout import in_rows, put_in_panels
from mllm_compile.runtime.updates.names import Specs
from mllm_compile.runtime.updates.places import Places
from mllm_compile.runtime.weights.spec import Factor
from mllm_compile.runtime.weights.sums import weight_sums


@dataclass(frozen=True)
class LiveWeights:
    """One rank's weights. Programs and captured graphs hold their addresses: they are written, never replaced.

    Attributes:
        specs: what they are.
        tensors: them, by name.
        panels: those that lie in panels, and the bytes of a unit.
        factors: the numbers that loading multiplied parts by.
        find_places: reads the names that updates may use, and gives the places of a rank.
        rank, num_ranks: which part these are of the model.
        written: the names of those that an update has written.
    """

    specs: Specs
    tensors: Mapping[str, torch.Tensor]
    panels: Mapping[str, int]
    factors: Mapping[Factor, float]
    find_places: Callable[[int], Places]
    rank: int = 0
    num_ranks: int = 1
    written: set[str] = field(default_factory=set)

    @cached_property
    def places(self) -> Places:
        """Where tensors go, found when the first update begins."""
        return self.find_places(self.rank)

    @cached_property
    def places_of_others(self) -> tuple[Places, ...]:
        """The places of the other ranks, likewise."""
        return tuple(self.find_places(rank) for rank in range(self.num_ranks) if rank != self.rank)

    def in_rows(self, name: str) -> torch.Tensor:
        """A copy of a weight, in the order that parts are of."""
        tensor = self.tensors[name]
        return in_rows(tensor, self.panels[name]) if name in self.panels else tensor.clone()

    def rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Some rows of a weight, likewise; a view of it unless it is in panels."""
        whole = self.in_rows(name) if name in self.panels else self.tensors[name]
        return whole.narrow(0, start, count)

    def as_served(self, name: str, weight: torch.Tensor) -> None:
        """Puts a weight of that order in place into the order in which it is served."""
        if name in self.panels:
            put_in_panels(weight, self.panels[name])

    def sums(self) -> dict[str, int]:
        """A 64-bit sum of each weight's bytes as they lie (weights/sums.py)."""
        return weight_sums(dict(self.tensors))
