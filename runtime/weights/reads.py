"""Finds the reads that fill weights: each range of a file's bytes and its destination; making.py has its conversion."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.weights.formats.base import VALUES, Quantised, StoredTensor
from mllm_compile.runtime.weights.formats.registry import FORMATS, is_stored
from mllm_compile.runtime.weights.header import entry_of, read_bytes
from mllm_compile.runtime.weights.making import Quantising, making_of
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec, place_of
from mllm_compile.runtime.weights.stream import Read, Source, Spacing, StraightRead, TensorRead
from mllm_compile.runtime.weights.tensor_entry import TensorEntry, WeightHeader
from mllm_compile.runtime.weights.views import ViewStep, view_shape, viewed


def reads_in_order(
    specs: Sequence[WeightSpec],
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    headers: Mapping[str, WeightHeader],
) -> Iterator[Read]:
    """The reads in the order of the files' bytes. A mixture of experts has many thousand. A file's reads are found one
    by one while the previous file is read: otherwise the reader would wait until all are found."""
    paths = {file: folder / file for file in headers}
    parts: dict[str, list[tuple[WeightPart, _Place]]] = {file: [] for file in headers}
    of_scheme: dict[str, list[TensorRead]] = {file: [] for file in headers}
    quantising = Quantising()
    for spec in specs:
        place = _Place.of(weights[spec.name])
        for part in spec.parts:
            if part.is_quantised_here:
                quantising.add(part, place_of(place.weight, part))
            else:
                parts[part.file].append((part, place))
    for part, read in _quantised_reads(quantising, folder, headers):
        of_scheme[part.file].append(read)

    def found(file: str) -> Iterator[Read | _LaterRead]:
        for part, place in parts[file]:
            if part.quantised is None:
                yield _plain_read(paths[file], part, place, folder, headers)
            else:
                straight = _kept_read(part, place, paths, folder, headers)
                yield straight or _read(part, place_of(place.weight, part), paths, folder, headers)
        yield from of_scheme[file]

    following: list[Read | _LaterRead] = []
    rest: Iterator[Read | _LaterRead] = iter(())
    for file in [*headers, None]:
        of_file = sorted([*following, *rest], key=attrgetter("begin"))
        following, rest = [], iter(()) if file is None else found(file)
        for one in of_file:
            yield one.made() if isinstance(one, _LaterRead) else one
            following += islice(rest, 1)


class _Place(NamedTuple):
    """A weight, and what its parts' reads take of it.

    Attributes:
        memory: its bytes; None: they are not in one stretch.
    """

    weight: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: torch.Tensor | None

    @classmethod
    def of(cls, weight: torch.Tensor) -> _Place:
        memory = weight.view(-1).view(torch.uint8) if weight.is_contiguous() else None
        return cls(weight, tuple(weight.shape), weight.dtype, memory)


class _LaterRead(NamedTuple):
    """A read of a tensor that is converted: it takes long to make, and is made when it is its turn."""

    begin: int
    path: Path
    entry: TensorEntry
    part: WeightPart
    weight: torch.Tensor

    def made(self) -> TensorRead:
        return _read_stored(self.path, self.entry, self.part.steps, place_of(self.weight, self.part))


def _plain_read(
    path: Path, part: WeightPart, place: _Place, folder: Path, headers: Mapping[str, WeightHeader]
) -> StraightRead | _LaterRead:
    """The read of a weight that is stored as it is."""
    weight, shape, dtype, memory = place
    size = dtype.itemsize
    # Numbers of eight bits mean nothing in another type.
    entry = entry_of(folder, headers, part.file, part.tensor, part.shape, dtype if size == 1 else None)
    stored_dtype, _, begin, end = entry
    places = _places_of(part.shape, part.steps, part.inner_starts, shape) if stored_dtype == dtype else None
    if memory is None or places is None or not places.hold(part.start):
        return _LaterRead(begin, path, entry, part, weight)
    return StraightRead(path, begin, end - begin, memory, places.of(part.start) * size)


def _kept_read(
    part: WeightPart,
    place: _Place,
    paths: Mapping[str, Path],
    folder: Path,
    headers: Mapping[str, WeightHeader],
) -> StraightRead | None:
    """The read of a scheme's tensor that the checkpoint has to the byte, if it is a stretch of the weight's; else
    None."""
    quantised, kept, memory = part.quantised, part.kept, place.memory
    if quantised is None or kept is None or memory is None or not is_stored(quantised, kept.role):
        return None
    (source,) = part.sources
    entry = entry_of(folder, headers, source.file, source.name, source.shape, source.dtype)
    steps = kept.steps(part.steps)
    places = _places_of(source.shape, steps, part.inner_starts, place.shape)
    shape = kept.scheme.shape(kept.role, *view_shape(part.shape, part.steps))
    if places is None or entry.dtype != place.dtype or view_shape(source.shape, steps) != shape:
        return None
    if not places.hold(part.start):
        return None  # place_of refuses it
    _check_details(quantised, folder, headers)
    offset = places.of(part.start) * place.dtype.itemsize
    return StraightRead(paths[source.file], entry.begin, entry.end - entry.begin, memory, offset)


class _Places(NamedTuple):
    """Where parts of one kind begin in a weight: that with the start 0, and how far the next is, in numbers; and the
    last start."""

    first: int
    distance: int
    last: int

    def hold(self, start: int) -> bool:
        """True if the part that begins there is within the weight."""
        return 0 <= start <= self.last

    def of(self, start: int) -> int:
        return self.first + self.distance * start


@lru_cache(maxsize=4096)  # as view_shape
def _places_of(
    part: tuple[int, ...], steps: tuple[ViewStep, ...], inner_starts: tuple[int, ...], shape: tuple[int, ...]
) -> _Places | None:
    """None, if numbers of such a part do not follow each other there in their own order."""
    if any(step[0] != "unsqueeze" for step in steps):
        return None
    box = view_shape(part, steps) if steps else part
    starts = (0, *inner_starts, *(0 for _ in shape[1 + len(inner_starts) :]))
    if len(box) != len(shape):
        return None
    first, has_several = 0, False
    for size, start, extent in zip(shape, starts, box, strict=False):  # a scalar has none
        if (has_several and extent != size) or not 0 <= start <= size - extent:
            return None
        first, has_several = first * size + start, has_several or extent > 1
    return _Places(first, math.prod(shape[1:]), shape[0] - box[0] if shape else 0)


def _read(
    part: WeightPart,
    place: torch.Tensor,
    paths: Mapping[str, Path],
    folder: Path,
    headers: Mapping[str, WeightHeader],
) -> TensorRead:
    """The read of a weight that the checkpoint has quantised."""
    quantised = part.quantised
    assert quantised is not None, "others are _plain_read's"
    first, *others = (
        Source(paths[one.file], entry_of(folder, headers, one.file, one.name, one.shape, one.dtype))
        for one in part.sources
    )
    _check_details(quantised, folder, headers)
    making = making_of(part, place)
    if making.fill is None:
        return _read_stored(first.path, first.entry, making.steps, making.place)
    return TensorRead(first.path, first.entry, making.place, fill=making.fill, others=others)


def _read_stored(path: Path, entry: TensorEntry, steps: tuple[ViewStep, ...], place: torch.Tensor) -> TensorRead:
    """The read of a tensor as it is in its file, and of no more than `steps` leave of it."""
    entry, spacing, steps = _part_of_file(entry, steps)
    return TensorRead(path, entry, place, partial(viewed, steps=steps) if steps else None, spacing=spacing)


def _part_of_file(
    entry: TensorEntry, steps: tuple[ViewStep, ...]
) -> tuple[TensorEntry, Spacing | None, tuple[ViewStep, ...]]:
    """The bytes that the first step leaves of a tensor, where that takes a part of it, and the steps behind it.

    Rows are in one stretch; a part of each row in as many as there are rows.
    """
    if not steps or steps[0][0] != "narrow":
        return entry, None, steps
    dim, start, length = (int(number) for number in steps[0][1:])
    dim %= len(entry.shape)
    inner = math.prod(entry.shape[dim + 1 :]) * entry.dtype.itemsize
    stretch, distance, count = length * inner, entry.shape[dim] * inner, math.prod(entry.shape[:dim])
    begin = entry.begin + start * inner
    shape = (*entry.shape[:dim], length, *entry.shape[dim + 1 :])
    part = entry._replace(begin=begin, end=begin + stretch * count, shape=shape)
    return part, Spacing(stretch, distance) if count > 1 else None, steps[1:]


def _quantised_reads(
    quantising: Quantising, folder: Path, headers: Mapping[str, WeightHeader]
) -> Iterator[tuple[WeightPart, TensorRead]]:
    """The parts that are quantised while they are read, each with the read of it."""
    for part, rows, places, fill in quantising.found():
        entry = entry_of(folder, headers, part.file, part.tensor, part.shape)
        entry, spacing, rows = _part_of_file(entry, rows)
        place = next(iter(places.values()))
        yield part, TensorRead(folder / part.file, entry, place, fill=partial(_fill_from, rows, fill), spacing=spacing)


def _fill_from(
    rows: tuple[ViewStep, ...],
    fill: Callable[[torch.Tensor], None],
    place: torch.Tensor,
    tensors: Sequence[torch.Tensor],
) -> None:
    fill(viewed(tensors[0], rows))


def _check_details(quantised: Quantised, folder: Path, headers: Mapping[str, WeightHeader]) -> None:
    """Refuses numbers within small tensors that are others than those that were compiled for."""

    def read(one: StoredTensor) -> bytes:
        return read_bytes(folder / one.file, entry_of(folder, headers, one.file, one.name, one.shape, one.dtype))

    now = FORMATS[quantised.format].details(quantised.tensors, read)
    for name, value in now.items():
        if quantised.numbers.get(name) != value:
            one = quantised.tensors[VALUES]
            raise CheckpointError(
                f"{folder / one.file}: {one.name!r}: expected {name} to be {quantised.numbers.get(name)}, found "
                f"{value}. The checkpoint has changed since the model was compiled; compile it again."
            )
