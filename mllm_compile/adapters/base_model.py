"""The linears of a served model that adapters may change, and names that its modules have elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RowsOf:
    """Rows of a weight that are rows of a module that an adapter names.

    Attributes:
        weight: the weight's name.
        start: its first row of them; `source_start` is the module's.
        rows: how many there are.
    """

    weight: str
    start: int
    source_start: int
    rows: int


@dataclass(frozen=True)
class BaseModel:
    """The model, as far as adapters are concerned.

    Attributes:
        source: the model as it was asked for: a hub id or a path.
        targets: weight → (outputs, inputs), of each linear that adapters may change.
        modules: names of all its modules with a weight.
        elsewhere: module as a checkpoint or an adapter calls it → the rows of weights that it is, where that is not the
            weight of its own name.
        max_rank: the highest rank that there is room for.
        dtype: the type in which adapters lie on the device.
    """

    source: str
    targets: Mapping[str, tuple[int, int]]
    modules: Collection[str]
    elsewhere: Mapping[str, tuple[RowsOf, ...]]
    max_rank: int
    dtype: torch.dtype

    def rows_of(self, module: str) -> tuple[RowsOf, ...]:
        """The rows of targets that a module is; () if it is none."""
        weight = f"{module}.weight"
        if weight in self.targets:
            return (RowsOf(weight, 0, 0, self.targets[weight][0]),)
        return tuple(rows for rows in self.elsewhere.get(module, ()) if rows.weight in self.targets)

    @property
    def target_names(self) -> list[str]:
        """Last parts of the names of modules that adapters may change."""
        return sorted({weight.removesuffix(".weight").rpartition(".")[2] for weight in self.targets})
