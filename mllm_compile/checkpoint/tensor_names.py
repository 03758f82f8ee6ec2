"""Finds, while a model is compiled, the names that an update of its weights may use (runtime/updates/names.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mllm_compile.checkpoint.planned_tensor import PlannedTensor
from mllm_compile.runtime.weights.spec import WeightSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mllm_compile.checkpoint.quantised import CheckpointTensors
    from mllm_compile.runtime.weights.formats.base import StoredTensor


def parameter_table(model: PreTrainedModel, names: Iterable[Sequence[str]]) -> dict[str, PlannedTensor]:
    """The tensors that fill each key of the model where each is a whole parameter: like read_checkpoint's, of no files.

    Args:
        names: of each parameter; those of a tie are one tensor, by the first.
    """
    state = model.state_dict()
    return {name: PlannedTensor.of_file(of_one[0], "", tuple(state[name].shape)) for of_one in names for name in of_one}


def unread_shapes(
    model: PreTrainedModel,
    names: Iterable[Sequence[str]],
    tensors: CheckpointTensors | None,
    parameters: Iterable[Sequence[WeightSpec]],
    checkpoint: Iterable[Sequence[WeightSpec]],
) -> dict[str, list[tuple[int, ...]]]:
    """The parameters and the checkpoint's tensors that fill no weight, with their shapes.

    Args:
        names: of each parameter.
        parameters, checkpoint: the plans of all ranks by either names.
    """
    state, found = model.state_dict(), dict[str, list[tuple[int, ...]]]()
    for name in sorted({of_one[0] for of_one in names} - _sources(parameters)):
        found.setdefault(name, []).append(tuple(state[name].shape))
    stored: Mapping[str, StoredTensor] = {} if tensors is None else tensors.stored
    for name in sorted(stored.keys() - _sources(checkpoint)):
        found.setdefault(name, []).append(tuple(stored[name].shape))
    return found


def _sources(ranks: Iterable[Sequence[WeightSpec]]) -> set[str]:
    parts = [part for specs in ranks for spec in specs for part in spec.parts]
    names = {part.tensor for part in parts} | {part.factor.tensor.name for part in parts if part.factor is not None}
    return names | {one.name for part in parts if part.quantised is not None for one in part.quantised.tensors.values()}
