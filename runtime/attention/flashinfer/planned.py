"""The wrappers that are planned for the present step: layers run them, and captures put theirs in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DecodeMetadata:
    """Decode wrappers, one a plan group: planned, or the program's own, which need no plan."""

    decode_wrappers: list[Any]


@dataclass(frozen=True)
class PrefillMetadata:
    """Planned prefill wrappers, one a plan group; with use_ragged they read the new k and v, not the pages.

    They are given the tokens from `first_token` on.
    """

    prefill_wrappers: list[Any]
    use_ragged: bool
    first_token: int = 0


@dataclass(slots=True, eq=False)
class Planned:
    """
    Attributes:
        decodes: None: the step has none; likewise prefills.
        num_decodes: first rows of the step, which decode wrappers are given.
        has_blocks: some tokens of its images see each other in both directions.
    """

    decodes: DecodeMetadata | None = None
    prefills: PrefillMetadata | None = None
    num_decodes: int = 0
    has_blocks: bool = False

    def set(
        self,
        decodes: DecodeMetadata | None,
        prefills: PrefillMetadata | None,
        num_decodes: int,
        has_blocks: bool = False,
    ) -> None:
        """Takes the plan of a step in place of the last one's."""
        self.decodes, self.prefills = decodes, prefills
        self.num_decodes, self.has_blocks = num_decodes, has_blocks
