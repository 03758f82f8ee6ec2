"""Brings weights to their final, packed place on the device: from safetensors by name, or seeded random ones.

spec.py has each weight's place, which the compiler decided. reads.py finds the bytes, stream.py brings them, checks.py
checks them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from mllm_compile.runtime.device.arena import Arena
from mllm_compile.runtime.weights.checks import check_finite, check_sums
from mllm_compile.runtime.weights.header import read_header
from mllm_compile.runtime.weights.making import Quantising
from mllm_compile.runtime.weights.reads import reads_in_order
from mllm_compile.runtime.weights.spec import Factor, WeightSpec, place_of
from mllm_compile.runtime.weights.stream import stream_tensors
from mllm_compile.runtime.weights.tensor_entry import WeightHeader
from mllm_compile.runtime.weights.views import viewed

_DUMMY_STD = 0.02  # the usual initializer_range: activations keep their size through the layers


def allocate_weights(specs: Sequence[WeightSpec], device: str, arena: Arena | None = None) -> dict[str, torch.Tensor]:
    """Uninitialised weights by name, in `arena` if there is one."""
    if arena is None:
        return {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs}
    tensors = arena.empty([(spec.shape, spec.dtype) for spec in specs])
    return {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}


def load_weights(
    specs: Sequence[WeightSpec],
    weights: dict[str, torch.Tensor],
    folder: Path,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> dict[Factor, float]:
    """Fills `weights` from the safetensors files of `folder`.

    Args:
        specs: the weights to read.
        weights: tensors from allocate_weights, filled in place.
        folder: the model folder.
        advance: called with the bytes read so far done, for a progress bar.

    Returns:
        The number that each factor of a part is; an update multiplies by it too.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, does not hold what the spec says, or holds NaN or inf.
        DamagedWeightsError: packed weights are not those that were packed.
    """
    _fill_zeros(specs, weights)
    headers = {file: read_header(folder / file) for file in _files(specs)}
    if headers:
        stream_tensors(reads_in_order(specs, weights, folder, headers), weights[specs[0].name].device, advance)
    factors = _scale(specs, weights, folder, headers)
    check_sums(specs, weights, folder)
    check_finite(specs, weights, folder)
    return factors


def _fill_zeros(specs: Iterable[WeightSpec], weights: Mapping[str, torch.Tensor]) -> None:
    for spec in specs:
        if spec.has_zeros:
            weights[spec.name].zero_()


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
    headers: Mapping[str, WeightHeader],
) -> dict[Factor, float]:
    """Multiplies weights that have factors with them; the numbers of these."""
    found: dict[Factor, float] = {}
    for spec in specs:
        for part in spec.parts:
            if part.factor is not None:
                found[part.factor] = part.factor.value(folder, headers)
                place_of(weights[spec.name], part).mul_(found[part.factor])
    return found


def fill_random(specs: Iterable[WeightSpec], weights: dict[str, torch.Tensor], seed: int) -> None:
    """Fills `weights` with seeded random values, the same for a tensor however it is packed.

    Matrices are normal with standard deviation 0.02, vectors are one (norm scales) or zero (biases).
    """
    _fill_zeros(specs, weights)
    quantising = Quantising()
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
    quantising.random(partial(_fill_normal, seed=seed))


def _fill_normal(place: torch.Tensor, tensor: str, seed: int) -> None:
    digest = hashlib.sha256(f"{seed}:{tensor}".encode()).digest()
    generator = torch.Generator(place.device).manual_seed(int.from_bytes(digest[:7], "little"))
    place.normal_(0.0, _DUMMY_STD, generator=generator)
