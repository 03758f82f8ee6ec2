"""Where each tensor that an update may send goes: the map that loading uses, inverted.

Loading asks for a weight's parts, each with the tensors that it is made of; here a tensor's name gives the parts that
it fills. There are two vocabularies, the checkpoint's names and Transformers' parameters. A weight that the checkpoint
has quantised may come plain as well, under the name that it has in a checkpoint that is not.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import PurePath
from typing import Literal, NamedTuple

import torch

from mllm_compile.runtime.errors import WeightUpdateError
from mllm_compile.runtime.quantised.scheme import VALUES
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.updates.names import Specs, TensorNames
from mllm_compile.runtime.weights.file_names import is_gguf
from mllm_compile.runtime.weights.formats.base import FLOATS, StoredTensor
from mllm_compile.runtime.weights.formats.registry import FORMATS
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec
from mllm_compile.runtime.weights.views import view_shape

Vocabulary = Literal["checkpoint", "parameters"]


class Box(NamedTuple):
    """The numbers of a weight that a part fills."""

    weight: str
    starts: tuple[int, ...]
    shape: tuple[int, ...]


class Use(NamedTuple):
    """A part that a tensor fills, alone or with others."""

    spec: WeightSpec
    part: WeightPart

    @property
    def box(self) -> Box:
        part = self.part
        shape = view_shape(part.shape, part.steps) if part.steps else part.shape
        if part.kept is not None:
            shape = part.kept.scheme.shape(part.kept.role, *shape)
        starts = (part.start, *part.inner_starts)
        return Box(self.spec.name, (*starts, *(0 for _ in shape[len(starts) :])), shape)

    def source(self, name: str) -> StoredTensor | None:
        """The tensor of a quantised weight that has this name; None where the part is plain."""
        if self.part.quantised is None:
            return None
        return next(one for one in self.part.quantised.tensors.values() if one.name == name)

    def expected(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of this name."""
        source = self.source(name)
        return self.part.shape if source is None else source.shape

    def fault(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """The words for what is wrong with a tensor of this name, or None."""
        source, expected = self.source(name), self.expected(name)
        if source is not None:
            dtypes: tuple[torch.dtype, ...] = (source.dtype,)
        elif self.part.kept is not None or (self.spec.dtype.is_floating_point and self.spec.dtype.itemsize > 1):
            dtypes = FLOATS
        else:
            dtypes = (self.spec.dtype,)
        if shape != expected:
            return f"expected shape {list(expected)}, got {list(shape)}"
        return (
            None if dtype in dtypes else f"expected {' or '.join(map(_dtype_name, dtypes))}, got {_dtype_name(dtype)}"
        )


class Found(NamedTuple):
    """The parts that a tensor fills; none: the model has it, and this program or rank does not read it."""

    name: str
    uses: Sequence[Use]


class Places:
    """The places of one rank's weights by tensors' names.

    Args:
        names: of the runtime.
        stored: each rank's weights as the runtime reads them; None: they are random, so no checkpoint has names.
        rank: the rank.
    """

    def __init__(self, names: TensorNames, stored: tuple[Specs, ...] | None, rank: int) -> None:
        self.parameters = names.parameters[rank]
        of_checkpoint = stored if names.checkpoint is None else names.checkpoint
        self.checkpoint = () if of_checkpoint is None else of_checkpoint[rank]
        self._ties = {alias: tie for tie in names.ties for alias in tie}
        plain = tuple(replace(spec, parts=tuple(_plain_parts(spec))) for spec in self.checkpoint)
        self._tables: tuple[tuple[Vocabulary, dict[str, list[Use]]], ...] = (
            ("checkpoint", self._with_ties(_by_name(self.checkpoint))),
            ("checkpoint", self._with_ties(_by_name(plain))),
            ("parameters", self._with_ties(_by_name(self.parameters))),
        )
        self.factors = {
            part.factor.tensor.name: part.factor
            for specs in (self.checkpoint, self.parameters)
            for spec in specs
            for part in spec.parts
            if part.factor is not None
        }
        self._unread = {name: [tuple(shape) for shape in shapes] for name, shapes in names.unread.items()}
        for ranks in (names.parameters, of_checkpoint or ()):
            for name, uses in _by_name(chain(*ranks) if len(ranks) > 1 else ()).items():
                self._unread.setdefault(name, []).extend(use.expected(name) for use in uses)

    def find(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, only: Vocabulary | None = None) -> Found:
        """The places of a tensor.

        Args:
            only: the vocabulary of its name; None: any that has it.

        Raises:
            WeightUpdateError: no tensor has this name, this one has another shape or type, or the name has two
                meanings.
        """
        faults, found = [], list[list[Use]]()
        for vocabulary, table in self._tables:
            uses = table.get(name, []) if only in (None, vocabulary) else []
            fault = next((fault for use in uses if (fault := use.fault(name, shape, dtype))), None)
            if fault is not None:
                faults.append(fault)
            elif uses:
                found.append(uses)
        if len({_meaning(uses) for uses in found}) > 1:
            raise WeightUpdateError(
                f"tensor {name!r} is one thing in the checkpoint and another in Transformers' model, both of shape "
                f"{list(shape)}. Say which names these are: names='checkpoint' or names='parameters'."
            )
        if found:
            return Found(name, found[0])
        if faults:
            raise WeightUpdateError(f"tensor {name!r}: {' or '.join(dict.fromkeys(faults))}. Send it as it was loaded.")
        if name in self.factors and prod(shape) != 1:
            raise WeightUpdateError(f"tensor {name!r}: expected one number, got shape {list(shape)}.")
        if name in self.factors or shape in self._unread.get(name, ()):
            return Found(name, ())
        if name in self._unread:
            known = " or ".join(dict.fromkeys(str(list(one)) for one in self._unread[name]))
            raise WeightUpdateError(f"tensor {name!r}: expected shape {known}, got {list(shape)}. Send it as it is.")
        raise WeightUpdateError(f"this model has no tensor {short_repr(name)}{self._suggestion(name)}")

    def uses(self, name: str, only: Vocabulary | None = None) -> list[Use]:
        """The parts that a tensor of this name fills, whatever it is like; none as Found says.

        Raises:
            WeightUpdateError: no tensor has this name, it is quantised, or the name has two meanings.
        """
        found = [table[name] for vocabulary, table in self._tables if only in (None, vocabulary) and name in table]
        plain = [uses for uses in found if all(use.part.quantised is None for use in uses)]
        if len({_meaning(uses) for uses in plain}) == 1:
            return plain[0]
        if not found and name in self._unread:
            return []
        if not found:
            raise WeightUpdateError(f"this model has no tensor {short_repr(name)}{self._suggestion(name)}")
        raise WeightUpdateError(
            f"single values of {name!r} cannot be taken: it is quantised, or its name has two meanings. Send it whole."
        )

    def missing(self, filled: set[Box]) -> list[str]:
        """Names of tensors that an update lacks which is to be whole, in the vocabulary that lacks fewer."""
        lacking = [self._lacking(specs, filled) for specs in (self.checkpoint, self.parameters) if specs]
        incomplete = set[str].intersection(*(set(one) for one in lacking))
        named = ([name for weight, names in one.items() if weight in incomplete for name in names] for one in lacking)
        return min((list(dict.fromkeys(names)) for names in named), key=len)

    def filled_by(self, names: set[str]) -> set[Box]:
        """The boxes that tensors of these names fill."""
        known = names.union(*(self.same(name) for name in names))
        uses = (use for _, table in self._tables for name in known for use in table.get(name, ()))
        return {use.box for use in uses if known.issuperset(needed_of(use.part))}

    @staticmethod
    def _lacking(specs: Specs, filled: set[Box]) -> dict[str, list[str]]:
        """Weight → names of tensors whose boxes are not filled."""
        found: dict[str, list[str]] = {}
        for spec in specs:
            for part in spec.parts:
                if Use(spec, part).box not in filled:
                    found.setdefault(spec.name, []).extend(needed_of(part))
        return found

    def same(self, name: str) -> tuple[str, ...]:
        """The names of the same tensor where it is tied, this one among them; else empty."""
        return self._ties.get(name, ())

    @cached_property
    def all_names(self) -> list[str]:
        """Every name that may be sent."""
        return sorted({name for _, table in self._tables for name in table} | self._unread.keys())

    def _suggestion(self, name: str) -> str:
        close = difflib.get_close_matches(name[:200], self.all_names[:20_000], 1)
        return f". Did you mean {close[0]!r}?" if close else ". Send the names of its checkpoint, or its parameters'."

    def _with_ties(self, table: dict[str, list[Use]]) -> dict[str, list[Use]]:
        """The table with all names of tied tensors."""
        for name in list(table):
            for alias in self._ties.get(name, ()):
                table.setdefault(alias, table[name])
        return table


def _by_name(specs: Iterable[WeightSpec]) -> dict[str, list[Use]]:
    """The parts that each tensor is needed for."""
    table: dict[str, list[Use]] = {}
    for spec in specs:
        for part in spec.parts:
            for name in needed_of(part):
                table.setdefault(name, []).append(Use(spec, part))
    return table


def needed_of(part: WeightPart) -> list[str]:
    """The names of all tensors that must be there before a part is filled: of a quantised weight all of it."""
    return [part.tensor] if part.quantised is None else [one.name for one in part.quantised.tensors.values()]


def _plain_parts(spec: WeightSpec) -> Iterator[WeightPart]:
    """The parts of a weight that the checkpoint has quantised as one that is not quantised would have them."""
    for part in spec.parts:
        quantised = part.quantised
        if quantised is None or FORMATS[quantised.format].transposed or is_gguf(PurePath(part.file)):
            continue
        fmt = FORMATS[quantised.format]
        base = quantised.tensors[VALUES].name.removesuffix(fmt.roles[VALUES])
        yield replace(part, tensor=base + fmt.plain, quantised=None)


def _meaning(uses: Sequence[Use]) -> tuple[object, ...]:
    """The use of a tensor, equal where it does not matter in which vocabulary its name is."""
    return tuple(
        sorted(
            (
                use.spec.name,
                use.part.start,
                use.part.inner_starts,
                repr(use.part.steps),
                repr(use.part.kept),
                repr(use.part.quantised),
            )
            for use in uses
        )
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
