"""Parameters that calls work on before they meet cut values: where each element goes, and which cells it meets.

So a bias or a norm's weight is cut as what it is added to or multiplied with, also behind views.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch
from torch import fx

from mllm_compile.passes.match.nodes import is_weight
from mllm_compile.passes.sharding.calls import POINTWISE, VIEWS, name_of
from mllm_compile.passes.sharding.cells import Cells
from mllm_compile.passes.sharding.values import Values

_MOST_TRACED = 1 << 20  # elements of a parameter whose places are followed through calls

Labels = np.ndarray


class Parameters:
    """The parameters of one graph, element by element."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._places: dict[fx.Node, tuple[str, np.ndarray]] = {}  # what is made of one parameter: where each was in it
        self._shapes: dict[str, tuple[int, ...]] = {}  # of these parameters
        self._met: dict[str, list[tuple[np.ndarray, Labels]]] = defaultdict(list)  # their places, and what met them

    def add(self, weight: fx.Node) -> None:
        """Follows a parameter from here, unless it is too large."""
        shape = tuple(weight.meta["val"].shape)
        if math.prod(shape) <= _MOST_TRACED:
            name = weight.meta["weight_name"]
            self._shapes[name] = shape
            self._places[weight] = (name, np.arange(math.prod(shape)).reshape(shape))

    def parameter_of(self, node: fx.Node) -> str | None:
        """The parameter that a value is made of, element by element; None: it is of none, or of more."""
        return self._places[node][0] if node in self._places else None

    def read_by(self, node: fx.Node) -> str | None:
        """The parameter that a call reads by this value, also a large one; None: it is of none."""
        return self.parameter_of(node) or (node.meta["weight_name"] if is_weight(node) else None)

    def follow(self, node: fx.Node, tensors: list[fx.Node]) -> bool:
        """Follows what is made of one parameter alone, element by element; False for any other call."""
        if len(tensors) != 1 or tensors[0] not in self._places or not isinstance(node.meta["val"], torch.Tensor):
            return False
        weight, places = self._places[tensors[0]]
        if (name := name_of(node)) in VIEWS:
            self._places[node] = (weight, self._values.run(node, lambda one: places))
            return True
        if name in POINTWISE and self._values.shape(node) == places.shape:
            self._places[node] = (weight, places)
            return True
        return False

    def meet(self, node: fx.Node, shape: tuple[int, ...], labels: Labels) -> None:
        """Notes the labels that the elements of a followed value meet, both expanded to a shape."""
        name, places = self._places[node]
        self._met[name].append((np.broadcast_to(places, shape), np.broadcast_to(labels, shape)))

    def places(self, node: fx.Node) -> np.ndarray:
        """Where each element of a followed value is in its parameter."""
        return self._places[node][1]

    def uses(self, cells: Cells) -> Iterator[tuple[str, dict[int, Labels]]]:
        """Each parameter with the labels along a dimension that its elements met; {}: it is read whole."""
        for name, met in self._met.items():
            shape = self._shapes[name]
            labels = np.full(math.prod(shape), -1, dtype=np.int64)
            is_one = np.ones(math.prod(shape), dtype=bool)
            for places, met_labels in met:
                order = places.ravel()
                classes = cells.find(met_labels.ravel())
                np.maximum.at(labels, order, classes)
                is_one &= ~_differs(order, classes, labels)
            if (labels < 0).any() or not is_one.all():
                yield name, {}  # an element that several classes meet, or none
                continue
            grid = labels.reshape(shape)
            by_dim = {}
            for dim in range(grid.ndim):
                along = np.moveaxis(grid, dim, 0).reshape(grid.shape[dim], -1)
                if np.unique(along[0]).size == 1 or grid.ndim == 1:
                    by_dim[dim] = along[:, 0]
            by_dim = {dim: one for dim, one in by_dim.items() if np.unique(one).size > 1}
            yield name, by_dim if len(by_dim) == 1 else {}


def _differs(order: np.ndarray, classes: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """True for the elements with a class that is not their label."""
    differs = np.zeros(labels.size, dtype=bool)
    np.logical_or.at(differs, order, classes != labels[order])
    return differs
