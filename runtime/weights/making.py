"""Makes a part's place of its tensors: the views that are copied into its place, or the function that fills it.

Loading (reads.py) and updating (runtime/updates) share this; where the tensors' bytes come from is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from mllm_compile.runtime.quantised.scheme import WeightScheme
from mllm_compile.runtime.weights.formats.registry import fill_dequantised, fill_kept, fill_quantised, is_stored
from mllm_compile.runtime.weights.spec import QuantisedPart, WeightPart
from mllm_compile.runtime.weights.views import ViewStep, rows_first, unviewed, viewed

Fill = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]


class Making(NamedTuple):
    """How a place is filled.

    Attributes:
        place: what is filled.
        steps: views to take of the only tensor before it is copied; none beside `fill`.
        fill: computes the place from all of the part's tensors; None: the only one is copied.
    """

    place: torch.Tensor
    steps: tuple[ViewStep, ...]
    fill: Fill | None = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills the place; `tensors` are the part's sources, or the one tensor of a plain part."""
        if self.fill is not None:
            self.fill(self.place, tensors)
        else:
            self.place.copy_(viewed(tensors[0], self.steps) if self.steps else tensors[0])


def making_of(part: WeightPart, place: torch.Tensor) -> Making:
    """How `place` is filled from the tensors of `part`; one that is quantised here is Quantising's."""
    quantised, kept = part.quantised, part.kept
    if quantised is None:
        return Making(place, part.steps)
    steps = part.steps if kept is None else kept.steps(part.steps)
    as_stored = unviewed(place, steps)
    if as_stored is not None:
        place, steps = as_stored, ()
    view = partial(viewed, steps=steps) if steps else None
    if kept is None:

        def fill(place: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
            fill_dequantised(place, quantised, part.shape, view, tensors)

        return Making(place, (), fill)
    if is_stored(quantised, kept.role):
        return Making(place, steps)

    def fill_one(place: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        fill_kept(place, quantised, kept.role, kept.scheme, view, tensors)

    return Making(place, (), fill_one)


class ToQuantise(NamedTuple):
    """A plain tensor that is quantised on its way into the places of its scheme's tensors.

    Attributes:
        part: without what tells its places apart.
        rows: views that leave rows whole, to take of the tensor.
        places: by role.
        fill: fills all places from the rows.
    """

    part: WeightPart
    rows: tuple[ViewStep, ...]
    places: Mapping[str, torch.Tensor]
    fill: Callable[[torch.Tensor], None]


class Quantising:
    """Collects the places of plain weights that are quantised while they are read: a tensor is read once for all of
    its scheme's tensors."""

    def __init__(self) -> None:
        self._found: dict[tuple[WeightPart, WeightScheme], list[dict[str, torch.Tensor]]] = {}

    def add(self, part: WeightPart, place: torch.Tensor) -> None:
        """Keeps the place of a part of such a weight."""
        assert part.kept is not None, "others are read as they are"
        key = replace(part, kept=None, start=0, inner_starts=(), factor=None), part.kept.scheme
        weights = self._found.setdefault(key, [])
        places = next((one for one in weights if part.kept.role not in one), None)
        if places is None:
            weights.append(places := {})
        places[part.kept.role] = place

    def found(self) -> Iterator[ToQuantise]:
        """Each tensor with its places; one that fills several weights is there as often."""
        for (part, scheme), weights in self._found.items():
            rows, of_rows = rows_first(part.steps)
            for places in weights:
                yield ToQuantise(part, rows, places, partial(_quantise, places, of_rows, scheme))

    def random(self, fill: Callable[[torch.Tensor, str], None]) -> None:
        """Quantises weights that `fill`, given the tensor's name, makes up instead."""
        for one in self.found():
            device = next(iter(one.places.values())).device
            weight = torch.empty(one.part.shape, device=device)
            fill(weight, one.part.tensor)
            one.fill(viewed(weight, one.rows))


def _quantise(
    places: Mapping[str, torch.Tensor], of_rows: tuple[ViewStep, ...], scheme: WeightScheme, rows: torch.Tensor
) -> None:
    """Quantises whole rows: numbers and scales are the same over any number of ranks."""
    parts = {role: partial(viewed, steps=QuantisedPart(role, scheme).steps(of_rows)) for role in places}
    fill_quantised(places, rows, scheme, parts)
