"""The name of a page or a state: its place in the tree of prefixes. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from mllm_compile.runtime.schedule.tiers.index import Entry


@dataclass(frozen=True, slots=True)
class Place:
    """
    Attributes:
        key: 16 bytes: a hash over the page, all before it, and a secret. It alone says what the content is.
        parent: the key of the page before; of a first page its root's; empty of a state.
        first: the key of the first page of the path.
        depth: tokens of the path up to its end.
        is_state: a state behind the page `key`, and not the page.
    """

    key: bytes
    parent: bytes
    first: bytes
    depth: int
    is_state: bool

    @classmethod
    def of_entry(cls, entry: Entry, is_state: bool) -> Place:
        """The place of an entry of an index."""
        return cls(entry.key, entry.parent, entry.first, entry.depth, is_state)

    @property
    def name(self) -> str:
        """The place as text of letters, digits and `-`, alone of its kind; fit for a file."""
        kind = "s" if self.is_state else "p"
        return f"{self.key.hex()}-{self.parent.hex()}-{self.first.hex()}-{self.depth:x}{kind}"

    @classmethod
    def of_name(cls, name: str) -> Place | None:
        """The place that a name says; None: it says none."""
        parts = name.split("-")
        try:
            key, parent, first = (bytes.fromhex(part) for part in parts[:3])
            place = cls(key, parent, first, int(parts[3][:-1], 16), parts[3][-1] == "s")
        except (ValueError, IndexError):
            return None
        return place if place.name == name else None
