"""The sizes of quantised weights that a checkpoint's config names beside the tensors themselves. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT, ROW = (0, 0), (1, 0)  # blocks: one scale a weight, one a row


@dataclass(frozen=True)
class Settings:
    """Sizes that a checkpoint names; of several, the one that a weight's tensors have.

    Attributes:
        bits: of a value.
        groups: inputs that share a scale.
        blocks: outputs and inputs that share a scale; 0 stands for all.
        zero_offset: what was subtracted from a zero point before it was stored.
        in_order: inputs are in the order of their groups, also where the group of each is stored.
        is_ordered: inputs are in another order, so that the group of each is stored.
        symmetric: no zero points are stored; False: they are; None: of either kind.
    """

    bits: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    zero_offset: int = 0
    in_order: bool = False
    is_ordered: bool = False
    symmetric: bool | None = None
