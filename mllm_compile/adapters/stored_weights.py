"""Reads weights that adapters change as the checkpoint has them, whatever memory makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from mllm_compile.runtime.lora.target import LoraTarget
from mllm_compile.runtime.weights.loader import allocate_weights, load_weights
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec
from mllm_compile.runtime.weights.views import ViewStep, view_shape


class StoredWeights:
    """The weights of an engine's targets.

    Args:
        specs: what fills the program's weights.
        folder: of the files.
    """

    def __init__(self, specs: Iterable[WeightSpec], folder: Path, targets: Mapping[str, LoraTarget]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._folder, self._targets = folder, targets

    def read(self, weight: str, start: int, rows: int) -> torch.Tensor | None:
        """Rows [start, start + rows) of a target's weight, in float32 on the CPU; None where no file has them in rows.

        Raises:
            CheckpointError: a file is missing or is not what the model was compiled for.
        """
        target = self._targets[weight]
        spec = self._specs.get(target.stored_in)
        if spec is None:
            return None
        parts = list(_parts(spec, target.stored_start + start, rows))
        inputs = target.outputs if target.kind == "embedding" else target.inputs
        if sum(view_shape(part.shape, part.steps)[0] for part in parts) != rows or not all(
            part.file and part.factor is None and view_shape(part.shape, part.steps)[1:] == (inputs,) for part in parts
        ):
            return None
        wanted = WeightSpec(weight, (rows, inputs), torch.float32, tuple(parts))
        found = allocate_weights([wanted], "cpu")
        load_weights([wanted], found, self._folder)
        return found[weight]


def _parts(spec: WeightSpec, start: int, rows: int) -> Iterator[WeightPart]:
    """The parts of a weight that fill these rows, as plain numbers."""
    for part in spec.parts:
        (count, *others) = view_shape(part.shape, part.steps)
        first, last = max(start, part.start), min(start + rows, part.start + count)
        if first < last and len(others) == 1:
            cut: tuple[ViewStep, ...] = (("narrow", 0, first - part.start, last - first),)
            steps = part.steps if last - first == count else (*part.steps, *cut)
            yield replace(part, start=first - start, steps=steps, kept=None)
