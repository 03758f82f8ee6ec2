"""Weights that a model and its draft model read from the same place of the same files: memory holds them once.

A prediction layer's embeddings and head are the model's, and so are those that a head's files lack.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from mllm_compile.runtime.weights.spec import WeightSpec

if TYPE_CHECKING:
    from mllm_compile.store.opened import CompiledRuntime

_Contents = tuple[WeightSpec, int | None]  # without its name, its files by their places; the bytes of a panel's unit


def shared_weights(model: CompiledRuntime, drafter: CompiledRuntime) -> dict[str, str]:
    """The weights of a draft model that the model's are: name → the model's name. Random ones are not shared."""
    if any(one.artifact.manifest.weights.are_random for one in (model, drafter)):
        return {}
    shapes = {spec.shape for spec in drafter.artifact.weights}  # a mixture of experts has many thousand others
    known = {contents: name for name, contents in _contents(model, shapes).items()}
    wanted = _contents(drafter, shapes)
    return {name: known[contents] for name, contents in wanted.items() if contents in known}


def num_weight_bytes(compiled: CompiledRuntime) -> int:
    """Bytes of the weights of a runtime, of its draft model and of those that draft on from it."""
    num_bytes = sum(spec.num_bytes for spec in compiled.artifact.weights)
    drafter = compiled.drafter
    while drafter is not None:
        shared = shared_weights(compiled, drafter)
        num_bytes += sum(spec.num_bytes for spec in drafter.artifact.weights if spec.name not in shared)
        drafter = drafter.drafter
    return num_bytes


def _contents(runtime: CompiledRuntime, shapes: set[tuple[int, ...]]) -> dict[str, _Contents]:
    """The weights of these shapes by name, but those that are dequantised or scaled while they are read."""
    panels = runtime.artifact.program.every_panels()
    place = cache(lambda file: os.path.realpath(runtime.weights_root / file))
    found = {}
    for spec in runtime.artifact.weights:
        if spec.shape in shapes and all(part.quantised is None and part.factor is None for part in spec.parts):
            parts = tuple(replace(part, file=place(part.file)) for part in spec.parts)
            found[spec.name] = replace(spec, name="", parts=parts), panels.get(spec.name)
    return found
