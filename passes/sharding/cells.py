"""Cells and their classes: cells that have to be on one rank together, by union-find over arrays, and each class' rank.

A cell is an output feature of a linear whose input every rank has, or a row of a vocabulary. Cell 0 stands for what
every rank has; whatever is joined to it is cut no more.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

WHOLE = 0  # the label of what every rank has

Array = np.ndarray


class Cells:
    """Cells by the weight and the row that they are of; a class is named by its smallest cell."""

    def __init__(self) -> None:
        self._parents = np.zeros(1, dtype=np.int64)
        self._first: dict[str, tuple[int, int]] = {}  # weight → its first cell, and how many

    @property
    def weights(self) -> Mapping[str, tuple[int, int]]:
        """Each weight with cells: its first one, and how many."""
        return self._first

    def of_weight(self, name: str, count: int) -> Array:
        """[count] the cells of a weight's rows, made at the first call."""
        if name not in self._first:
            start = self._parents.size
            self._first[name] = (start, count)
            self._parents = np.concatenate([self._parents, np.arange(start, start + count)])
        start, count = self._first[name]
        return np.arange(start, start + count)

    def find(self, cells: Array) -> Array:
        """The class of each cell."""
        found: Array = self._parents[cells]
        while True:
            further = self._parents[found]
            if np.array_equal(further, found):
                break
            found = further
        self._parents[cells] = found
        return found

    def join(self, cells: Array, others: Array) -> None:
        """Makes one class of each cell and its partner; WHOLE among them makes a class whole."""
        while True:
            ours, theirs = self.find(cells.ravel()), self.find(others.ravel())
            differ = ours != theirs
            if not differ.any():
                return
            low, high = np.minimum(ours, theirs)[differ], np.maximum(ours, theirs)[differ]
            np.minimum.at(self._parents, high, low)

    def join_all(self, cells: Array) -> None:
        """Makes one class of all cells that are not whole."""
        cut = np.unique(self.classes_of(cells))
        if cut.size > 1:
            self.join(cut[:-1], cut[1:])

    def make_whole(self, cells: Array) -> None:
        """Gives the cells' classes to every rank."""
        cut = np.unique(self.classes_of(cells))
        self.join(cut, np.zeros_like(cut))

    def classes_of(self, cells: Array) -> Array:
        """The classes of those cells that are cut, one after another."""
        found = self.find(cells.ravel())
        cut: Array = found[found != WHOLE]
        return cut

    def weights_of(self, classes: Array) -> set[str]:
        """The weights with a cell in one of these classes."""
        return {
            name
            for name, (start, count) in self._first.items()
            if np.isin(self.find(np.arange(start, start + count)), classes).any()
        }

    def whole_weights(self) -> set[str]:
        """The weights with a cell that every rank has."""
        return {
            name
            for name, (start, count) in self._first.items()
            if (self.find(np.arange(start, start + count)) == WHOLE).any()
        }

    def deal(self, num_ranks: int, following: Mapping[int, Array]) -> Owners:
        """Deals classes out, in order and in equal parts: those with as many rows of the same weights together.

        Args:
            following: class → cells whose ranks have it, in place of a rank of its own: keys and values of fewer heads
                than ranks.
        """
        count = self._parents.size
        roots = self.find(np.arange(count))
        alike = np.zeros(count, dtype=np.uint64)
        numbers = np.random.default_rng(0)
        for start, length in self._first.values():
            number = numbers.integers(1, 2**63, dtype=np.uint64)
            np.add.at(alike, roots[start : start + length], number)
        is_class = (roots == np.arange(count)) & (roots != WHOLE)
        followers = {int(self.find(np.array([one]))[0]): cells for one, cells in following.items()}
        is_class[list(followers)] = False
        every = (1 << num_ranks) - 1
        owners = np.full(count, every, dtype=np.int64)
        undealt = []
        dealt = np.flatnonzero(is_class)
        for number in np.unique(alike[dealt]):
            members = dealt[alike[dealt] == number]
            if members.size % num_ranks:
                undealt.append(members)
            else:
                owners[members] = 1 << (np.arange(members.size) // (members.size // num_ranks))
        for root, cells in followers.items():
            if root != WHOLE:
                owners[root] = np.bitwise_or.reduce(owners[self.find(cells.ravel())])
        return Owners(self, owners, num_ranks, np.concatenate(undealt) if undealt else np.empty(0, dtype=np.int64))


class Owners:
    """The ranks of each class.

    Attributes:
        undealt: classes that cannot be dealt in equal parts.
    """

    def __init__(self, cells: Cells, masks: Array, num_ranks: int, undealt: Array) -> None:
        self._cells = cells
        self._masks = masks  # a bit for each rank, by class
        self.num_ranks = num_ranks
        self.undealt = undealt

    def has(self, labels: Array, rank: int) -> Array:
        """True for the cells of these that are on `rank`."""
        mask: Array = (self._masks[self._cells.find(labels.ravel())] >> rank) & 1
        return mask.reshape(labels.shape).astype(bool)

    def are_held_once(self, labels: Array) -> bool:
        """True if each is on one rank alone."""
        masks = self._masks[self._cells.find(labels.ravel())]
        return bool(((masks & (masks - 1)) == 0).all())

    def box(self, labels: Array, rank: int) -> list[Array] | None:
        """The indices that `rank` has in each dimension; None where what it has is not their product."""
        mask = self.has(labels, rank)
        kept = [
            np.flatnonzero(mask.any(axis=tuple(d for d in range(mask.ndim) if d != dim))) for dim in range(mask.ndim)
        ]
        return kept if int(mask.sum()) == np.prod([one.size for one in kept]) else None
