"""The weights of a served model that adapters may change, and names that its modules have elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mllm_compile.runtime.cuda import host_pages

if TYPE_CHECKING:
    import torch


ReadRows = Callable[[str, int, int], "torch.Tensor | None"]
NewBytes = Callable[[int], "torch.Tensor"]
_ROWS = 4096  # read at once


def pageable_bytes(count: int) -> torch.Tensor:
    """[count] uint8 on the host, of any content, in large pages: small ones take 35 ms of 87 MB to be made."""
    import torch

    memory = torch.empty(count, dtype=torch.uint8)
    host_pages.prefer_large(memory.data_ptr(), count)
    return memory


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
class StackedExperts:
    """How many experts a weight is of, and all parameters of its module in their order."""

    num_experts: int
    siblings: tuple[str, ...]


@dataclass(frozen=True)
class BaseModel:
    """The model, as far as adapters are concerned.

    Attributes:
        source: the model as it was asked for: a hub id or a path.
        folder: where it is; an adapter that lies there too is its own.
        targets: weight → (outputs, inputs), of each that adapters may change; the inputs of an embedding are ids.
        modules: names of all its modules with a weight.
        elsewhere: module as a checkpoint or an adapter calls it → the rows of weights that it is, where that is not the
            weight of its own name.
        max_rank: the highest rank that there is room for.
        dtype: the type in which adapters lie on the device.
        embedding, head: the weights among the targets that are theirs; "" where it is no target.
        experts: those targets that are a parameter for all experts of a layer.
        unread: modules that no text goes through, such as a tower of images.
        takes_dora: there is room for scales of linears' outputs.
        read: gives [start, start + rows) of a target's weight as the checkpoint, or an update, has it, on the CPU; None
            where it has it otherwise.
        new_bytes: gives so many bytes of the host's memory, [n] uint8, which files are read into.
    """

    source: str
    targets: Mapping[str, tuple[int, int]]
    modules: Collection[str]
    elsewhere: Mapping[str, tuple[RowsOf, ...]]
    max_rank: int
    dtype: torch.dtype
    embedding: str = ""
    head: str = ""
    experts: Mapping[str, StackedExperts] = field(default_factory=dict)
    takes_dora: bool = False
    unread: tuple[str, ...] = ()
    read: ReadRows = lambda *_: None
    new_bytes: NewBytes = pageable_bytes
    folder: Path | None = None

    def rows_of(self, module: str) -> tuple[RowsOf, ...]:
        """The rows of targets that a module is; () if it is none."""
        weight = module if module in self.experts else f"{module}.weight"
        if weight in self.targets:
            return (RowsOf(weight, 0, 0, self.targets[weight][0]),)
        return tuple(rows for rows in self.elsewhere.get(module, ()) if rows.weight in self.targets)

    @property
    def target_names(self) -> list[str]:
        """Last parts of the names of modules that adapters may change."""
        return sorted({module_of(weight).rpartition(".")[2] for weight in self.targets})


def module_of(weight: str) -> str:
    """The module whose weight this is."""
    return weight.removesuffix(".weight")


def is_copy(copy: torch.Tensor, weight: str, shape: tuple[int, int], base: BaseModel) -> bool | None:
    """True if a matrix is a weight of the model, also where one of them was rounded to the other's type.

    None: they cannot be compared.
    """
    if tuple(copy.shape) != shape:
        return False
    for start in range(0, shape[0], _ROWS):
        part = copy[start : start + _ROWS]
        stored = base.read(weight, start, len(part))
        if stored is None:
            return None
        if not (stored.to(part.dtype).equal(part) or stored.equal(part.to(stored.dtype))):
            return False
    return True
