"""Brings weights to their final, packed place on the device: from safetensors by name, or seeded random ones.

The compiler decided what goes where (WeightSpec); weights/stream.py brings bytes from a file to the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mllm_compile.runtime.errors import CheckpointError, DamagedWeightsError
from mllm_compile.runtime.json_data import from_json
from mllm_compile.runtime.weights.formats.base import VALUES, Quantised
from mllm_compile.runtime.weights.formats.every import FORMATS, fill_dequantised
from mllm_compile.runtime.weights.safetensors_header import SafetensorsHeader, TensorEntry, read_bytes, read_header
from mllm_compile.runtime.weights.stream import Source, Spacing, TensorRead, stream_tensors
from mllm_compile.runtime.weights.sums import weight_sums

_CHECKED_ROWS = 4096  # of a weight that is looked at value by value: bounds what that takes beside it
_DUMMY_STD = 0.02  # the usual initializer_range: activations keep their size through the layers


# A view to take of a tensor: ("narrow", dim, start, length), ("transpose", dim, dim), ("reshape", *sizes),
# ("squeeze", dim), ("unsqueeze", dim).
ViewStep = tuple[str | int, ...]


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
    """

    tensor: str
    file: str
    start: int
    shape: tuple[int, ...]
    steps: tuple[ViewStep, ...] = ()
    inner_starts: tuple[int, ...] = ()
    quantised: Quantised | None = None

    @property
    def num_elements_read(self) -> int:
        """The elements of the tensor that are read: where the first step takes a part, that part."""
        is_part = bool(self.steps) and self.steps[0][0] == "narrow"
        return math.prod(view_shape(self.shape, self.steps[:1]) if is_part else self.shape)


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
        return sum(
            part.quantised.num_bytes if part.quantised else part.num_elements_read * self.dtype.itemsize
            for part in self.parts
        )

    def to_json(self) -> dict[str, Any]:
        return _jsonable(asdict(self))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WeightSpec:
        """Raises ValueError for anything that to_json would not have written."""
        return from_json(cls, data)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


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


def view_shape(shape: tuple[int, ...], steps: Iterable[ViewStep]) -> tuple[int, ...]:
    """The shape of a tensor of `shape` after the views of `steps`."""
    return tuple(viewed(torch.empty(shape, device="meta"), steps).shape)


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
    parts = [part for spec in specs for part in spec.parts]
    headers = {file: read_header(folder / file) for file in sorted({file for part in parts for file in _files(part)})}
    stream_tensors(
        [_read(part, place_of(weights[spec.name], part), folder, headers) for spec in specs for part in spec.parts],
        advance,
    )
    _check_sums(specs, weights, folder)
    _check_finite(specs, weights, folder)


def _files(part: WeightPart) -> set[str]:
    return {part.file} | ({tensor.file for tensor in part.quantised.tensors.values()} if part.quantised else set())


def _read(part: WeightPart, place: torch.Tensor, folder: Path, headers: Mapping[str, SafetensorsHeader]) -> TensorRead:
    view = partial(viewed, steps=part.steps) if part.steps else None
    if part.quantised is None:
        entry = _entry(folder, headers, part.file, part.tensor, part.shape)
        entry, spacing, steps = _part_of_file(entry, part.steps)
        view = partial(viewed, steps=steps) if steps else None
        return TensorRead(folder / part.file, entry, place, view, spacing=spacing)
    quantised = part.quantised
    first, *others = (
        Source(folder / one.file, _entry(folder, headers, one.file, one.name, one.shape, one.dtype))
        for one in quantised.tensors.values()
    )
    _check_details(quantised, folder, headers)
    if (unviewed := _unviewed(place, part.steps)) is not None:
        place, view = unviewed, None

    def fill(place: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        fill_dequantised(place, quantised, part.shape, view, tensors)

    return TensorRead(first.path, first.entry, place, fill=fill, others=others)


def _part_of_file(
    entry: TensorEntry, steps: tuple[ViewStep, ...]
) -> tuple[TensorEntry, Spacing | None, tuple[ViewStep, ...]]:
    """The bytes that the first step leaves of a tensor, where that takes a part of it, and the steps behind it.

    Rows lie in one stretch; a part of each row in as many as there are rows.
    """
    if not steps or steps[0][0] != "narrow":
        return entry, None, steps
    dim, start, length = (int(number) for number in steps[0][1:])
    inner = math.prod(entry.shape[dim + 1 :]) * entry.dtype.itemsize
    stretch, distance, count = length * inner, entry.shape[dim] * inner, math.prod(entry.shape[:dim])
    begin = entry.begin + start * inner
    shape = (*entry.shape[:dim], length, *entry.shape[dim + 1 :])
    part = replace(entry, begin=begin, end=begin + stretch * count, shape=shape)
    return part, Spacing(stretch, distance) if count > 1 else None, steps[1:]


def _unviewed(place: torch.Tensor, steps: Sequence[ViewStep]) -> torch.Tensor | None:
    """The place as a tensor is before the views of `steps`, to be filled straight; None where there is no such view."""
    for name, *args in reversed(steps):
        if name not in _INVERSE:
            return None
        place = _VIEWS[_INVERSE[name]](place, *args)
    return place


def _check_details(quantised: Quantised, folder: Path, headers: Mapping[str, SafetensorsHeader]) -> None:
    """Refuses numbers within small tensors that are others than those that were compiled for."""
    now = FORMATS[quantised.format].details(
        quantised.tensors,
        lambda one: read_bytes(folder / one.file, headers[one.file].tensors[one.name]),
    )
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
    may overflow as well, so the weight is looked at again before it is refused.
    """
    summed = [spec for spec in specs if spec.dtype.is_floating_point and spec.dtype.itemsize > 1]
    if not summed:
        return
    are_finite = torch.stack([weights[spec.name].sum().float() for spec in summed]).isfinite()
    for spec, is_finite in zip(summed, are_finite.tolist(), strict=True):
        if not is_finite:
            for part in spec.parts:
                _check_part(part, place_of(weights[spec.name], part), folder)


def _check_part(part: WeightPart, place: torch.Tensor, folder: Path) -> None:
    slices = place.split(_CHECKED_ROWS) if place.dim() else (place,)
    num_bad = sum(int((~values.isfinite()).sum()) for values in slices)
    if num_bad:
        raise CheckpointError(
            f"{folder / part.file}: tensor {part.tensor!r} holds NaN or inf in {num_bad} of its {place.numel()} values "
            f"as {str(place.dtype).removeprefix('torch.')}. Fetch the checkpoint again; if it is whole, set "
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
    """The view of `weight` that `part` fills."""
    shape = view_shape(part.shape, part.steps) if part.steps else part.shape
    starts = (part.start, *part.inner_starts)
    for dim, (start, size) in enumerate(zip(starts, shape, strict=False)):  # no inner starts: all of those dimensions
        weight = weight.narrow(dim, start, size)
    return weight


def fill_random(specs: Iterable[WeightSpec], weights: dict[str, torch.Tensor], seed: int) -> None:
    """Fills `weights` with seeded random values, the same for a tensor however it is packed.

    Matrices are normal with standard deviation 0.02, vectors are one (norm scales) or zero (biases).
    """
    for spec in specs:
        for part in spec.parts:
            place = place_of(weights[spec.name], part)
            if len(part.shape) < 2:
                place.fill_(0.0 if part.tensor.endswith("bias") else 1.0)
                continue
            digest = hashlib.sha256(f"{seed}:{part.tensor}".encode()).digest()
            generator = torch.Generator(place.device).manual_seed(int.from_bytes(digest[:7], "little"))
            drawn = place.new_empty(part.shape) if part.steps else place
            drawn.normal_(0.0, _DUMMY_STD, generator=generator)
            if part.steps:  # a rank's part of a tensor: it is the same on all ranks
                place.copy_(viewed(drawn, part.steps))
