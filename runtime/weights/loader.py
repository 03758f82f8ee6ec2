"""Brings weights to their final, packed place on the device: from safetensors by name, or seeded random ones.

The compiler decided what goes where (WeightSpec); weights/stream.py brings bytes from a file to the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

from mllm_compile.runtime.errors import CheckpointError, DamagedWeightsError
from mllm_compile.runtime.quantised.numbers import E8M0_NAN
from mllm_compile.runtime.quantised.scheme import SCALES, WeightScheme
from mllm_compile.runtime.shown import brief, shown
from mllm_compile.runtime.weights.formats.base import VALUES, Quantised, StoredTensor
from mllm_compile.runtime.weights.formats.every import (
    FORMATS,
    fill_dequantised,
    fill_quantised,
    fill_small,
    is_stored,
    small_sources,
)
from mllm_compile.runtime.weights.safetensors_header import SafetensorsHeader, TensorEntry, read_bytes, read_header
from mllm_compile.runtime.weights.stream import Read, Source, Spacing, StraightRead, TensorRead, stream_tensors
from mllm_compile.runtime.weights.sums import weight_sums

_DAMAGED = "in the runtime's program.json is damaged; compile the model again"
_CHECKED_ROWS = 4096  # of a weight that is looked at value by value: bounds what that takes beside it
_DUMMY_STD = 0.02  # the usual initializer_range: activations keep their size through the layers


# A view to take of a tensor: ("narrow", dim, start, length), ("transpose", dim, dim), ("reshape", *sizes),
# ("squeeze", dim), ("unsqueeze", dim).
ViewStep = tuple[str | int, ...]


@dataclass(frozen=True)
class SmallPart:
    """The tensor of a weight's scheme that a part is: one of the checkpoint's own, where it is quantised, else of the
    weight quantised while it is read."""

    role: str
    scheme: WeightScheme

    def steps(self, steps: Iterable[ViewStep]) -> tuple[ViewStep, ...]:
        """The views of this tensor, where `steps` are those of the weight, parts of its inputs of dimension -1."""
        return tuple(
            ("narrow", -1, *self.scheme.stretch(self.role, int(step[2]), int(step[3])))
            if step[:2] == ("narrow", -1)
            else step
            for step in steps
        )


@dataclass(frozen=True)
class Factor:
    """A scale of the checkpoint, of one number, that a weight is multiplied with, or divided by, as the next power of
    two: no digit of the weight changes."""

    tensor: StoredTensor
    is_divided: bool

    def value(self, folder: Path, headers: Mapping[str, SafetensorsHeader]) -> float:
        """Raises CheckpointError if it is not a positive number."""
        one = self.tensor
        entry = _entry(folder, headers, one.file, one.name, one.shape, one.dtype)
        number = torch.frombuffer(bytearray(read_bytes(folder / one.file, entry)), dtype=one.dtype).item()
        if not 0 < number < math.inf:
            raise CheckpointError(
                f"{folder / one.file}: {one.name!r}: expected a positive number, as the scale of a KV cache, found "
                f"{number}. Fetch the checkpoint again, or set compile.disable_passes: [scale_keys_and_values]."
            )
        part, exponent = math.frexp(number)
        power = math.ldexp(1.0, exponent - 1 if part == 0.5 else exponent)
        return 1 / power if self.is_divided else power


@dataclass(frozen=True)
class WeightPart:
    """One checkpoint tensor and the box of the weight that it fills.

    Attributes:
        tensor: its name in the checkpoint.
        file: the safetensors file that holds it, relative to the model folder; "" for random weights.
        start: the box's first row in dimension 0; how many there are follows from the shape.
        shape: the tensor's own shape.
        steps: views to take of the tensor, in order, before it is copied.
        inner_starts: where the box begins in dimensions 1, 2, …; empty for all of each.
        quantised: the tensors that the weight is computed from, `tensor` the one of its values; `shape` is what they
            make. None: it is stored as it is.
        small: the tensor of its scheme that the box gets of the weight; None: the weight itself.
        factor: what is multiplied into it; None: nothing is.
    """

    tensor: str
    file: str
    start: int
    shape: tuple[int, ...]
    steps: tuple[ViewStep, ...] = ()
    inner_starts: tuple[int, ...] = ()
    quantised: Quantised | None = None
    small: SmallPart | None = None
    factor: Factor | None = None

    @property
    def is_quantised_here(self) -> bool:
        """True if the checkpoint has it as it is, and memory is to have it quantised."""
        return self.small is not None and self.quantised is None

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The tensors that a quantised weight, or what is wanted of it, is computed from."""
        if self.quantised is None:
            return ()
        tensors = self.quantised.tensors
        if self.small is None:
            return tuple(tensors.values())
        return tuple(tensors[role] for role in small_sources(self.quantised, self.small.role))

    def num_bytes(self, dtype: torch.dtype) -> int:
        """The bytes that are read for it; a plain tensor counts as one of `dtype`."""
        if self.quantised is not None and self.small is not None and is_stored(self.quantised, self.small.role):
            (source,) = self.sources
            return _num_read(source.shape, self.small.steps(self.steps)) * source.dtype.itemsize
        if self.quantised is not None:
            return sum(tensor.num_bytes for tensor in self.sources)
        if self.small is not None:  # of the tensors that are made of one, the values count
            return 2 * _num_read(self.shape, _rows_first(self.steps)[0]) if self.small.role == VALUES else 0
        return _num_read(self.shape, self.steps) * dtype.itemsize


def _num_read(shape: tuple[int, ...], steps: tuple[ViewStep, ...]) -> int:
    """Numbers that are read of a tensor: of one whose first view is a part of it, no others."""
    is_part = bool(steps) and steps[0][0] == "narrow"
    return math.prod(view_shape(shape, steps[:1]) if is_part else shape)


@dataclass(frozen=True)
class WeightSpec:
    """One weight of the program.

    Attributes:
        name, shape, dtype: its place.
        parts: the checkpoint tensors that fill it, in row order.
        byte_sum: sums.py's sum of its bytes; None where the checkpoint may be another one of the same shapes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[WeightPart, ...]
    byte_sum: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def num_bytes_read(self) -> int:
        """The bytes of files that fill it, other dtypes left aside."""
        return sum(part.num_bytes(self.dtype) for part in self.parts)


def viewed(tensor: torch.Tensor, steps: Iterable[ViewStep]) -> torch.Tensor:
    """`tensor` after the views of `steps`; no data is copied unless a reshape needs it."""
    for name, *args in steps:
        tensor = _VIEWS[str(name)](tensor, *args)
    return tensor


_VIEWS: dict[str, Callable[..., torch.Tensor]] = {
    "narrow": torch.narrow,
    "transpose": torch.transpose,
    "reshape": lambda tensor, *sizes: tensor.reshape(sizes),
    "squeeze": torch.squeeze,
    "unsqueeze": torch.unsqueeze,
}
_INVERSE = {"transpose": "transpose", "unsqueeze": "squeeze"}


@lru_cache(maxsize=4096)  # experts, many thousand, have few shapes and no two the same places
def view_shape(shape: tuple[int, ...], steps: tuple[ViewStep, ...]) -> tuple[int, ...]:
    """The shape of a tensor of `shape` after the views of `steps`.

    Raises:
        CheckpointError: it has no such views.
    """
    try:
        if any(step[0] == "narrow" and int(step[2]) < 0 for step in steps):
            raise ValueError("a part begins ahead of it")  # torch would count from its end
        return tuple(viewed(torch.empty(shape, device="meta"), steps).shape)
    except (RuntimeError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"a tensor of shape {list(shape)} cannot be viewed by {shown(steps)} ({brief(str(error))}): the table of "
            f"weights {_DAMAGED}"
        ) from error


def allocate_weights(specs: Iterable[WeightSpec], device: str) -> dict[str, torch.Tensor]:
    """Uninitialised weights by name."""
    return {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs}


def load_weights(
    specs: Sequence[WeightSpec],
    weights: dict[str, torch.Tensor],
    folder: Path,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Fills `weights` from the safetensors files of `folder`.

    Args:
        specs: the weights to read.
        weights: tensors from allocate_weights, filled in place.
        folder: the model folder.
        advance: called with the bytes read so far done, for a progress bar.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, does not hold what the spec says, or holds NaN or inf.
        DamagedWeightsError: packed weights are not those that were packed.
    """
    headers = {file: read_header(folder / file) for file in _files(specs)}
    if headers:
        stream_tensors(_reads_in_order(specs, weights, folder, headers), weights[specs[0].name].device, advance)
    _scale(specs, weights, folder, headers)
    _check_sums(specs, weights, folder)
    _check_finite(specs, weights, folder)


def _reads_in_order(
    specs: Sequence[WeightSpec],
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    headers: Mapping[str, SafetensorsHeader],
) -> Iterator[Read]:
    """The reads in the order of the files' bytes. A mixture of experts has many thousand: those of a file are found one
    by one while the file before it is read, as whoever reads cannot go on while all of them are found."""
    paths = {file: folder / file for file in headers}
    parts: dict[str, list[tuple[WeightPart, _Place]]] = {file: [] for file in headers}
    of_scheme: dict[str, list[TensorRead]] = {file: [] for file in headers}
    quantising = _Quantising()
    for spec in specs:
        place = _Place.of(weights[spec.name])
        for part in spec.parts:
            if part.is_quantised_here:
                quantising.add(part, place_of(place.weight, part))
            else:
                parts[part.file].append((part, place))
    for part, read in quantising.reads(folder, headers):
        of_scheme[part.file].append(read)

    def found(file: str) -> Iterator[Read | _LaterRead]:
        for part, place in parts[file]:
            if part.quantised is None:
                yield _plain_read(paths[file], part, place, folder, headers)
            else:
                straight = _small_read(part, place, paths, folder, headers)
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
        memory: its bytes; None: they do not lie in one stretch.
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
    path: Path, part: WeightPart, place: _Place, folder: Path, headers: Mapping[str, SafetensorsHeader]
) -> StraightRead | _LaterRead:
    """The read of a weight that is stored as it is."""
    weight, shape, dtype, memory = place
    size = dtype.itemsize
    # Numbers of eight bits mean nothing in another type.
    entry = _entry(folder, headers, part.file, part.tensor, part.shape, dtype if size == 1 else None)
    stored_dtype, _, begin, end = entry
    places = _places_of(part.shape, part.steps, part.inner_starts, shape) if stored_dtype == dtype else None
    if memory is None or places is None or not places.hold(part.start):
        return _LaterRead(begin, path, entry, part, weight)
    return StraightRead(path, begin, end - begin, memory, places.of(part.start) * size)


def _small_read(
    part: WeightPart,
    place: _Place,
    paths: Mapping[str, Path],
    folder: Path,
    headers: Mapping[str, SafetensorsHeader],
) -> StraightRead | None:
    """The read of a scheme's tensor that the checkpoint has to the byte, if it is a stretch of the weight's; else
    None."""
    quantised, small, memory = part.quantised, part.small, place.memory
    if quantised is None or small is None or memory is None or not is_stored(quantised, small.role):
        return None
    (source,) = part.sources
    entry = _entry(folder, headers, source.file, source.name, source.shape, source.dtype)
    steps = small.steps(part.steps)
    places = _places_of(source.shape, steps, part.inner_starts, place.shape)
    shape = small.scheme.shape(small.role, *view_shape(part.shape, part.steps))
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
        """True if the part that begins there lies within the weight."""
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
    for size, start, extent in zip(shape, starts, box, strict=False):  # of a scalar there is none
        if (has_several and extent != size) or not 0 <= start <= size - extent:
            return None
        first, has_several = first * size + start, has_several or extent > 1
    return _Places(first, math.prod(shape[1:]), shape[0] - box[0] if shape else 0)


def _files(specs: Iterable[WeightSpec]) -> list[str]:
    """The files that weights are read from, in order."""
    parts = [part for spec in specs for part in spec.parts]
    files = {part.file for part in parts}
    files |= {one.file for part in parts if part.quantised is not None for one in part.quantised.tensors.values()}
    files |= {part.factor.tensor.file for part in parts if part.factor is not None}
    return sorted(files)


def _scale(
    specs: Iterable[WeightSpec],
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    headers: Mapping[str, SafetensorsHeader],
) -> None:
    """Multiplies weights that have factors with them."""
    for spec in specs:
        for part in spec.parts:
            if part.factor is not None:
                place_of(weights[spec.name], part).mul_(part.factor.value(folder, headers))


def _read(
    part: WeightPart,
    place: torch.Tensor,
    paths: Mapping[str, Path],
    folder: Path,
    headers: Mapping[str, SafetensorsHeader],
) -> TensorRead:
    """The read of a weight that the checkpoint has quantised."""
    quantised, small = part.quantised, part.small
    assert quantised is not None, "others are _plain_read's"
    steps = part.steps if small is None else small.steps(part.steps)
    view = partial(viewed, steps=steps) if steps else None
    first, *others = (
        Source(paths[one.file], _entry(folder, headers, one.file, one.name, one.shape, one.dtype))
        for one in part.sources
    )
    _check_details(quantised, folder, headers)
    unviewed = _unviewed(place, steps)
    if unviewed is not None:
        place, steps, view = unviewed, (), None
    if small is not None and is_stored(quantised, small.role):
        return _read_stored(first.path, first.entry, steps, place)
    if small is not None:

        def fill_one(place: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
            fill_small(place, quantised, small.role, small.scheme, view, tensors)

        return TensorRead(first.path, first.entry, place, fill=fill_one, others=others)

    def fill(place: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        fill_dequantised(place, quantised, part.shape, view, tensors)

    return TensorRead(first.path, first.entry, place, fill=fill, others=others)


def _read_stored(path: Path, entry: TensorEntry, steps: tuple[ViewStep, ...], place: torch.Tensor) -> TensorRead:
    """The read of a tensor as it is in its file, and of no more than `steps` leave of it."""
    entry, spacing, steps = _part_of_file(entry, steps)
    return TensorRead(path, entry, place, partial(viewed, steps=steps) if steps else None, spacing=spacing)


def _part_of_file(
    entry: TensorEntry, steps: tuple[ViewStep, ...]
) -> tuple[TensorEntry, Spacing | None, tuple[ViewStep, ...]]:
    """The bytes that the first step leaves of a tensor, where that takes a part of it, and the steps behind it.

    Rows lie in one stretch; a part of each row in as many as there are rows.
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


class _Quantising:
    """Collects the places of plain weights that are quantised while they are read: a tensor is read once for all of
    its scheme's tensors."""

    def __init__(self) -> None:
        self._found: dict[tuple[WeightPart, WeightScheme], list[dict[str, torch.Tensor]]] = {}

    def add(self, part: WeightPart, place: torch.Tensor) -> None:
        """Keeps the place of a part of such a weight."""
        assert part.small is not None, "others are read as they are"
        key = replace(part, small=None, start=0, inner_starts=(), factor=None), part.small.scheme
        weights = self._found.setdefault(key, [])
        places = next((one for one in weights if part.small.role not in one), None)
        if places is None:
            weights.append(places := {})
        places[part.small.role] = place

    def reads(self, folder: Path, headers: Mapping[str, SafetensorsHeader]) -> Iterator[tuple[WeightPart, TensorRead]]:
        """The parts, each with the read of it."""
        for (part, scheme), weights in self._found.items():
            for places in weights:
                entry = _entry(folder, headers, part.file, part.tensor, part.shape)
                rows, of_rows = _rows_first(part.steps)
                entry, spacing, rows = _part_of_file(entry, rows)
                fill = partial(_quantise, places, rows, of_rows, scheme)
                place = next(iter(places.values()))
                yield part, TensorRead(folder / part.file, entry, place, fill=fill, spacing=spacing)

    def random(self, seed: int) -> None:
        """Quantises random weights instead."""
        for (part, scheme), weights in self._found.items():
            for places in weights:
                device = next(iter(places.values())).device
                weight = torch.empty(part.shape, device=device)
                _fill_normal(weight, part.tensor, seed)
                _quantise(places, *_rows_first(part.steps), scheme, weight, [weight])


def _rows_first(steps: tuple[ViewStep, ...]) -> tuple[tuple[ViewStep, ...], tuple[ViewStep, ...]]:
    """The views of a weight that leave its rows whole, and those behind them, which take a rank's part of each row."""
    count = next((place for place, step in enumerate(steps) if step[:2] == ("narrow", -1)), len(steps))
    return steps[:count], steps[count:]


def _quantise(
    places: Mapping[str, torch.Tensor],
    rows: tuple[ViewStep, ...],
    of_rows: tuple[ViewStep, ...],
    scheme: WeightScheme,
    place: torch.Tensor,
    tensors: Sequence[torch.Tensor],
) -> None:
    """Quantises whole rows: numbers and scales are the same over any number of ranks."""
    parts = {role: partial(viewed, steps=SmallPart(role, scheme).steps(of_rows)) for role in places}
    fill_quantised(places, viewed(tensors[0], rows), scheme, parts)


def _unviewed(place: torch.Tensor, steps: Sequence[ViewStep]) -> torch.Tensor | None:
    """The place as a tensor is before the views of `steps`, to be filled straight; None where there is no such view."""
    for name, *args in reversed(steps):
        if name not in _INVERSE:
            return None
        place = _VIEWS[_INVERSE[name]](place, *args)
    return place


def _check_details(quantised: Quantised, folder: Path, headers: Mapping[str, SafetensorsHeader]) -> None:
    """Refuses numbers within small tensors that are others than those that were compiled for."""

    def read(one: StoredTensor) -> bytes:
        return read_bytes(folder / one.file, _entry(folder, headers, one.file, one.name, one.shape, one.dtype))

    now = FORMATS[quantised.format].details(quantised.tensors, read)
    for name, value in now.items():
        if quantised.numbers.get(name) != value:
            one = quantised.tensors[VALUES]
            raise CheckpointError(
                f"{folder / one.file}: {one.name!r}: expected {name} to be {quantised.numbers.get(name)}, found "
                f"{value}. The checkpoint has changed since the model was compiled; compile it again."
            )


def _check_finite(specs: Sequence[WeightSpec], weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Refuse weights with NaN or inf: one reduction a weight, and one look at all of them together.

    A sum shows every such value and reads at the memory's speed (16 GB in some 5 ms on an H100). One of finite values
    may overflow as well, so the weight is looked at again before it is refused. Of values in eight bits, which have no
    inf, two are NaN; of scales that are powers of two one is. Other scales in eight bits are not negative either.
    """
    floats = [spec for spec in specs if spec.dtype == torch.float8_e4m3fn]
    _check_eight_bits(floats, weights, folder, 0x7F, "holds NaN among its values in eight bits")
    powers = [spec for spec in specs if any(_has_scales_of(part, torch.uint8) for part in spec.parts)]
    _check_eight_bits(powers, weights, folder, E8M0_NAN, "holds NaN among its scales in eight bits")
    scales = [spec for spec in floats if any(_has_scales_of(part, torch.float8_e4m3fn) for part in spec.parts)]
    _check_eight_bits(scales, weights, folder, 0x80, "holds a negative scale")
    summed = [spec for spec in specs if spec.dtype.is_floating_point and spec.dtype.itemsize > 1]
    if not summed:
        return
    are_finite = torch.stack([weights[spec.name].sum().float() for spec in summed]).isfinite()
    for spec, is_finite in zip(summed, are_finite.tolist(), strict=True):
        if not is_finite:
            for part in spec.parts:
                _check_part(part, place_of(weights[spec.name], part), folder)


def _has_scales_of(part: WeightPart, dtype: torch.dtype) -> bool:
    return part.small is not None and part.small.role == SCALES and part.small.scheme.scale_dtype == dtype


def _check_eight_bits(
    specs: Sequence[WeightSpec], weights: Mapping[str, torch.Tensor], folder: Path, bits: int, what: str
) -> None:
    """Refuses weights with a byte that has all of `bits` set."""
    if not specs:
        return
    are_wrong = torch.stack([_has_bits(weights[spec.name], bits) for spec in specs])
    for spec, is_wrong in zip(specs, are_wrong.tolist(), strict=True):
        for part in spec.parts if is_wrong else ():
            if _has_bits(place_of(weights[spec.name], part), bits):
                raise CheckpointError(
                    f"{folder / part.file}: tensor {part.tensor!r} {what}. Fetch the checkpoint again."
                )


def _has_bits(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[] bool of values in eight bits, a few rows at a time."""
    rows = values.view(torch.uint8).split(_CHECKED_ROWS if values.dim() == 2 else 1)
    return torch.stack([((some & bits) == bits).any() for some in rows]).any()


def _check_part(part: WeightPart, place: torch.Tensor, folder: Path) -> None:
    slices = place.split(_CHECKED_ROWS) if place.dim() else (place,)
    num_bad = sum(int((~values.isfinite()).sum()) for values in slices)
    if num_bad:
        why = "" if part.quantised is None else ": a scale is no number that it may be, or a group is not there"
        raise CheckpointError(
            f"{folder / part.file}: tensor {part.tensor!r} holds NaN or inf in {num_bad} of its {place.numel()} values "
            f"as {str(place.dtype).removeprefix('torch.')}{why}. Fetch the checkpoint again; if it is whole, set "
            "model.dtype to one that holds its values, such as bfloat16 or float32."
        )


def _check_sums(specs: Iterable[WeightSpec], weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Compare packed weights in their place with the sums that their specs remember."""
    known = {spec.name: spec for spec in specs if spec.byte_sum is not None}
    for name, byte_sum in weight_sums({name: weights[name] for name in known}).items():
        if byte_sum != known[name].byte_sum:
            raise DamagedWeightsError(
                f"{folder / known[name].parts[0].file}: {name!r} is not what was packed (its sum differs); "
                "compile the model again with --pack-weights, or put the file back"
            )


def _entry(
    folder: Path,
    headers: Mapping[str, SafetensorsHeader],
    file: str,
    tensor: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> TensorEntry:
    """The tensor's place in its file; `dtype` is None where any is converted."""
    entry = headers[file].tensors.get(tensor)
    if entry is None or entry.shape != shape or dtype not in (None, entry.dtype):
        found = "no such tensor" if entry is None else f"shape {list(entry.shape)}"
        if entry is not None and entry.shape == shape:
            found = str(entry.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{folder / file}: expected tensor {tensor!r} of shape {list(shape)}"
            f"{'' if dtype is None else ' in ' + str(dtype).removeprefix('torch.')}, found {found}. The checkpoint "
            "has changed since the model was compiled; compile it again."
        )
    return entry


def place_of(weight: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """The view of `weight` that `part` fills.

    Raises:
        CheckpointError: it has no such part.
    """
    shape = view_shape(part.shape, part.steps) if part.steps else part.shape
    if part.small is not None:
        shape = part.small.scheme.shape(part.small.role, *shape)
    starts = (part.start, *part.inner_starts)
    starts += (0,) * (len(shape) - len(starts))  # no inner starts: all of those dimensions
    is_within = len(shape) == weight.dim() and all(
        0 <= start <= whole - size for start, size, whole in zip(starts, shape, weight.shape, strict=False)
    )
    if not is_within:
        raise CheckpointError(
            f"tensor {part.tensor!r}: a weight of shape {list(weight.shape)} has no place for {list(shape)} that "
            f"begins at {shown(starts)}: the table of weights {_DAMAGED}"
        )
    for dim, (start, size) in enumerate(zip(starts, shape, strict=False)):  # of a scalar there is none
        weight = weight.narrow(dim, start, size)
    return weight


def fill_random(specs: Iterable[WeightSpec], weights: dict[str, torch.Tensor], seed: int) -> None:
    """Fills `weights` with seeded random values, the same for a tensor however it is packed.

    Matrices are normal with standard deviation 0.02, vectors are one (norm scales) or zero (biases).
    """
    quantising = _Quantising()
    for spec in specs:
        for part in spec.parts:
            place = place_of(weights[spec.name], part)
            if part.is_quantised_here:
                quantising.add(part, place)
            elif len(part.shape) < 2:
                place.fill_(0.0 if part.tensor.endswith("bias") else 1.0)
            elif part.steps:  # a rank's part of a tensor that is the same for all ranks
                whole = place.new_empty(part.shape)
                _fill_normal(whole, part.tensor, seed)
                place.copy_(viewed(whole, part.steps))
            else:
                _fill_normal(place, part.tensor, seed)
    quantising.random(seed)


def _fill_normal(place: torch.Tensor, tensor: str, seed: int) -> None:
    digest = hashlib.sha256(f"{seed}:{tensor}".encode()).digest()
    generator = torch.Generator(place.device).manual_seed(int.from_bytes(digest[:7], "little"))
    place.normal_(0.0, _DUMMY_STD, generator=generator)
