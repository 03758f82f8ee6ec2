"""States of cached prefixes: which node of the prefix cache has its state in which row of GDNPool.

A prefix of a model whose layers carry a state is worth something only with that state. Rows behind those of running
requests hold copies (*snapshots*), the least recently used of which makes room. Free of torch. ../state_copies.py
says what is kept; steps copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class StateSnapshots:
    """Rows `first_row` to `first_row + count - 1`, each free, reserved for a step in flight, or a node's.

    A row may be given to its next owner while a step that reads it is in flight: steps run in order on one stream.
    """

    def __init__(self, first_row: int = 0, count: int = 0) -> None:
        self.count = count
        self._free = list(range(first_row, first_row + count))
        self._rows: OrderedDict[Hashable, int] = OrderedDict()  # by node, the least recently used first

    @property
    def num_kept(self) -> int:
        """Nodes with a state."""
        return len(self._rows)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, node: Hashable) -> bool:
        return node in self._rows

    def use(self, node: Hashable) -> int:
        """The row of a node that has one, which counts as used now."""
        self._rows.move_to_end(node)
        return self._rows[node]

    def reserve(self) -> int | None:
        """A row for a new snapshot; None while all are reserved."""
        if self._free:
            return self._free.pop()
        return self._rows.popitem(last=False)[1] if self._rows else None

    def release(self, row: int) -> None:
        """Take back a reserved row whose snapshot is not wanted."""
        self._free.append(row)

    def keep(self, node: Hashable, row: int) -> None:
        """Make a reserved row the node's."""
        self._rows[node] = row

    def drop(self, node: Hashable) -> None:
        """Forget the node's state, if it has one: its pages are gone."""
        row = self._rows.pop(node, None)
        if row is not None:
            self._free.append(row)
