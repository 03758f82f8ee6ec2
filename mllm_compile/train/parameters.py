"""Places of trainable parameters: views into the served weights where these hold them as they are.

A served weight may be several parameters beside each other, as q, k and v. Then each parameter is a view of its rows,
and an optimiser that writes in place writes what is served. A weight in panels (runtime/ops/panels/layout.py), and a
second copy of a tied one, cannot be viewed so: `publish` copies the parameters there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.runtime.ops.panels.layout import in_rows, put_in_panels
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec, place_of
from mllm_compile.runtime.weights.views import ViewStep, unviewed, viewed


class _Copy(NamedTuple):
    """A part of a served weight, and the part of a parameter that it repeats, taken by other views."""

    place: torch.Tensor
    parameter: torch.Tensor
    undone: tuple[ViewStep, ...]
    steps: tuple[ViewStep, ...]

    def run(self) -> None:
        whole = unviewed(self.parameter, self.undone)
        self.place.copy_(viewed(self.parameter if whole is None else whole, self.steps))


class ParameterPlaces:
    """The parameters of a model that is served.

    Attributes:
        parameters: name → data; a view into a served weight where there can be one.
    """

    def __init__(
        self,
        specs: Sequence[WeightSpec],
        served: Sequence[WeightSpec],
        weights: Mapping[str, torch.Tensor],
        panels: Mapping[str, int],
    ) -> None:
        """
        Args:
            specs: the parameters, and the tensors of the checkpoint that fill them.
            served: the served weights, likewise.
            weights: name → served weight.
            panels: served weights in panels, and the bytes of a unit.

        Raises:
            UnsupportedModelError: a served weight is not made of parameters alone.
        """
        self._weights, self._panels = weights, panels
        self._served = served
        self._served_with: dict[str, list[WeightSpec]] = defaultdict(list)
        for spec in served:
            for tensor in dict.fromkeys(part.tensor for part in spec.parts):
                self._served_with[tensor].append(spec)
        self.parameters: dict[str, torch.Tensor] = {}
        viewed_places: set[tuple[str, str]] = set()
        for spec in specs:
            view = self._view(spec)
            if view is None:
                data = torch.empty(spec.shape, dtype=spec.dtype, device=weights[served[0].name].device)
            else:
                name, data = view
                viewed_places.update((name, part.tensor) for part in spec.parts)
            self.parameters[spec.name] = data
        self._fill(specs, viewed_places)
        self._copies = dict(self._copies_of(specs, viewed_places))

    def publish(self) -> None:
        """Brings what parameters are now to the served weights that are no views of them."""
        for name, copies in self._copies.items():
            for copy in copies:
                copy.run()
            if name in self._panels:
                put_in_panels(self._weights[name].data, self._panels[name])

    def _view(self, spec: WeightSpec) -> tuple[str, torch.Tensor] | None:
        """(served weight, the parameter's data as a view of it); None: none holds it as it is."""
        for served in self._served_with.get(spec.parts[0].tensor, ()):
            if served.name in self._panels or served.dtype != spec.dtype or len(served.shape) != len(spec.shape):
                continue
            places = {(part.tensor, part.steps): part for part in served.parts}
            pairs = [(part, places.get((part.tensor, part.steps))) for part in spec.parts]
            offsets = {None if of is None else _offset(part, of, len(spec.shape)) for part, of in pairs}
            offset = offsets.pop()
            if offset is None or offsets:
                continue
            data = self._weights[served.name].data  # a version counter of its own for each parameter
            for dim, (start, size) in enumerate(zip(offset, spec.shape, strict=True)):
                data = data.narrow(dim, start, size)
            return served.name, data
        return None

    def _fill(self, specs: Sequence[WeightSpec], viewed_places: set[tuple[str, str]]) -> None:
        """Reads parameters that are no views from the served weights."""
        sources: dict[tuple[str, tuple[ViewStep, ...]], tuple[str, WeightPart]] = {}
        for served in self._served:
            sources |= {(part.tensor, part.steps): (served.name, part) for part in served.parts}
        held: tuple[str, torch.Tensor] = "", torch.empty(0)
        for spec in specs:
            for part in spec.parts:
                if any((served.name, part.tensor) in viewed_places for served in self._served_with[part.tensor]):
                    continue
                if (part.tensor, part.steps) not in sources:
                    raise _is_elsewhere(spec.name, part.tensor)
                name, of = sources[part.tensor, part.steps]
                if held[0] != name:
                    weight = self._weights[name]
                    held = name, in_rows(weight, self._panels[name]) if name in self._panels else weight
                place_of(self.parameters[spec.name], part).copy_(place_of(held[1], of))

    def _copies_of(
        self, specs: Sequence[WeightSpec], viewed_places: set[tuple[str, str]]
    ) -> Iterator[tuple[str, list[_Copy]]]:
        homes: dict[str, list[tuple[WeightSpec, WeightPart]]] = defaultdict(list)
        for spec in specs:
            for part in spec.parts:
                homes[part.tensor].append((spec, part))
        for served in self._served:
            copies = []
            for part in served.parts:
                if (served.name, part.tensor) in viewed_places:
                    continue
                place = place_of(self._weights[served.name].data, part)
                copies.append(self._copy(served.name, place, part, homes[part.tensor]))
            if copies:
                yield served.name, copies

    def _copy(
        self, name: str, place: torch.Tensor, part: WeightPart, homes: Sequence[tuple[WeightSpec, WeightPart]]
    ) -> _Copy:
        for spec, home in homes:
            data = place_of(self.parameters[spec.name], home)
            if home.steps == part.steps:
                return _Copy(place, data, (), ())
            if unviewed(data, home.steps) is not None:
                return _Copy(place, data, home.steps, part.steps)
        raise _is_elsewhere(name, part.tensor)


def _offset(part: WeightPart, of: WeightPart, dims: int) -> tuple[int, ...]:
    """Where a parameter begins in a served weight, by the places of one tensor in both."""
    starts, others = ((one.start, *one.inner_starts) for one in (part, of))
    padded = (tuple(one) + (0,) * (dims - len(one)) for one in (starts, others))
    return tuple(other - start for start, other in zip(*padded, strict=True))


def _is_elsewhere(name: str, tensor: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"trainable: {name} holds the checkpoint's {tensor!r} in another order than Transformers' parameters, which "
        "gradients cannot follow. Save the model with Transformers' save_pretrained, and train that."
    )
