"""States of cached prefixes: after the last pages of runs of the prefix cache, each in a row of GDNPool.

A prefix of a model whose layers carry a state is worth something only with that state. Rows behind the running
requests' hold copies (*snapshots*); the least recently used makes room. Free of torch. ../state_copies.py says what is
kept; steps copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable


class StateSnapshots:
    """Rows `first_row` to `first_row + count - 1`, each free, reserved for a step in flight, or a run's.

    A row may be given to its next owner while a step that reads it is in flight: steps run in order on one stream.
    """

    def __init__(self, first_row: int = 0, count: int = 0) -> None:
        self.count = count
        self._free = list(range(first_row, first_row + count))
        self._rows: OrderedDict[Hashable, int] = OrderedDict()  # by run, the least recently used first
        self._held: set[Hashable] = set()

    @property
    def num_kept(self) -> int:
        """Runs with a state."""
        return len(self._rows)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, run: Hashable) -> bool:
        return run in self._rows

    def use(self, run: Hashable) -> int:
        """The row of a run that has one, which counts as used now."""
        self._rows.move_to_end(run)
        return self._rows[run]

    def reserve(self, but_not: Container[int] = ()) -> int | None:
        """A row for a new snapshot; None while all are reserved or held.

        Args:
            but_not: rows that are read by a step that is not launched, for who writes ahead of it.
        """
        if self._free:
            return self._free.pop()
        run = next((run for run, row in self._rows.items() if run not in self._held and row not in but_not), None)
        return None if run is None else self._rows.pop(run)

    def hold(self, run: Hashable) -> int:
        """The row of a locked run that has one, which stays its own until `let_go`: it is read beside the steps."""
        self._held.add(run)
        return self._rows[run]

    def let_go(self, run: Hashable) -> None:
        """Lets others have the row of a run that was held."""
        self._held.discard(run)

    def release(self, row: int) -> None:
        """Take back a reserved row whose snapshot is not wanted."""
        self._free.append(row)

    def keep(self, run: Hashable, row: int) -> None:
        """Make a reserved row the run's."""
        self._rows[run] = row

    def drop(self, run: Hashable) -> None:
        """Forget the run's state, if it has one: its last pages are gone."""
        row = self._rows.pop(run, None)
        if row is not None:
            self._free.append(row)
