"""Brings weights to their final, packed place on the device: from safetensors by name, or seeded random ones.

What goes where was decided when the model was compiled (WeightSpec); this module only reads, converts the dtype and
copies. Nothing is materialised twice: a tensor of a file is a view of the mapped pages.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.safetensors_header import TensorEntry, read_header

_READERS = 4
_DUMMY_STD = 0.02  # the usual initializer_range: activations keep their size through the layers


@dataclass(frozen=True)
class WeightPart:
    """One checkpoint tensor and the rows of the weight that it fills.

    Attributes:
        tensor: its name in the checkpoint.
        file: the safetensors file that holds it, relative to the model folder; "" for random weights.
        start: first row of dimension 0; the rows follow from the shape.
        shape: the tensor's own shape.
    """

    tensor: str
    file: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightSpec:
    """One weight of the program: its place, and the checkpoint tensors that fill it, in row order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[WeightPart, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def allocate_weights(specs: Iterable[WeightSpec], device: str) -> dict[str, torch.Tensor]:
    """Uninitialised weights by name."""
    return {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs}


def load_weights(
    specs: Iterable[WeightSpec],
    weights: dict[str, torch.Tensor],
    folder: Path,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Fills `weights` from the safetensors files of `folder`.

    Args:
        specs: what to read.
        weights: tensors from allocate_weights, filled in place.
        folder: the model folder.
        advance: called with the bytes read so far done, for a progress bar.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, or does not hold what the spec says.
    """
    by_file: dict[str, list[tuple[WeightSpec, WeightPart]]] = defaultdict(list)
    for spec in specs:
        for part in spec.parts:
            by_file[part.file].append((spec, part))
    with ThreadPoolExecutor(min(_READERS, max(1, len(by_file))), thread_name_prefix="weights") as readers:
        jobs = [
            readers.submit(_load_file, folder / file, wanted, weights, advance)
            for file, wanted in sorted(by_file.items())
        ]
        for job in jobs:
            job.result()


def _load_file(
    path: Path,
    wanted: list[tuple[WeightSpec, WeightPart]],
    weights: dict[str, torch.Tensor],
    advance: Callable[[int], None],
) -> None:
    header = read_header(path)
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    for spec, part in wanted:
        entry = header.tensors.get(part.tensor)
        if entry is None or entry.shape != part.shape:
            found = "no such tensor" if entry is None else f"shape {list(entry.shape)}"
            raise CheckpointError(
                f"{path}: expected tensor {part.tensor!r} of shape {list(part.shape)}, found {found}. The checkpoint has "
                "changed since the model was compiled; compile it again."
            )
        place_of(weights[spec.name], part).copy_(_view(mapped, entry))
        advance(entry.end - entry.begin)


def _view(mapped: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    data = mapped[entry.begin : entry.end]
    if entry.begin % entry.dtype.itemsize:  # a header of odd length: typed views need alignment
        data = data.clone()
    return data.view(entry.dtype).view(entry.shape)


def place_of(weight: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """The view of `weight` that `part` fills."""
    if not part.shape:
        return weight
    return weight.narrow(0, part.start, part.shape[0])


def fill_random(specs: Iterable[WeightSpec], weights: dict[str, torch.Tensor], seed: int) -> None:
    """Fills `weights` with seeded random values, the same for a tensor however it is packed.

    Matrices are normal with standard deviation 0.02, vectors are one (norm scales) or zero (biases).
    """
    for spec in specs:
        for part in spec.parts:
            place = place_of(weights[spec.name], part)
            if place.dim() < 2:
                place.fill_(0.0 if part.tensor.endswith("bias") else 1.0)
                continue
            digest = hashlib.sha256(f"{seed}:{part.tensor}".encode()).digest()
            generator = torch.Generator(place.device).manual_seed(int.from_bytes(digest[:7], "little"))
            place.normal_(0.0, _DUMMY_STD, generator=generator)
