"""Where each weight of a lowered model comes from, for every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mllm_compile.compiler.lowered import Lowered

if TYPE_CHECKING:
    import torch

    from mllm_compile.checkpoint.planned_tensor import PlannedTensor
    from mllm_compile.runtime.updates.names import TensorNames
    from mllm_compile.runtime.weights.spec import WeightSpec


def plan_lowered_weights(
    lowered: Lowered,
) -> tuple[dict[str, torch.Tensor], tuple[tuple[WeightSpec, ...], ...], TensorNames]:
    """The program's constants by name, of each rank where each of its weights comes from, and the names that updates
    may use."""
    from mllm_compile.checkpoint.tensor_names import parameter_table, unread_shapes
    from mllm_compile.compiler.program_builder import weight_shapes
    from mllm_compile.runtime.updates.names import TensorNames

    needed = set(lowered.program.every_weight())
    constants = {name: value for name, value in lowered.hf_model.constants.items() if name in needed}
    shapes = {name: shape for one in reversed(lowered.every) for name, shape in weight_shapes(one.graph).items()}
    shapes = {name: shape for name, shape in shapes.items() if name in needed and name not in constants}
    built = lowered.built
    weights = _plan(lowered, shapes, built.table)
    parameters = _plan(lowered, shapes, parameter_table(lowered.hf_model.model, built.names))
    unread = unread_shapes(lowered.hf_model.model, built.names, built.tensors, parameters, weights)
    ties = tuple(tuple(names) for names in built.names if len(names) > 1)
    return constants, weights, TensorNames(parameters, None, ties, unread)


def _plan(
    lowered: Lowered,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    table: Mapping[str, PlannedTensor] | None,
) -> tuple[tuple[WeightSpec, ...], ...]:
    """The weights of these shapes, by rank, filled as `table` says."""
    from mllm_compile.checkpoint.cache_scales import planned_factors
    from mllm_compile.checkpoint.plan import RankPart, plan_weights

    packed = {name: parts for one in lowered.every for name, parts in one.packed.items()}
    quantised = {name: tensor for one in lowered.every for name, tensor in one.quantised.items()}
    tensors = lowered.built.tensors
    factors = (
        {}
        if tensors is None
        else planned_factors({name: factor for one in lowered.every for name, factor in one.factors.items()}, tensors)
    )
    return tuple(
        tuple(
            plan_weights(shapes, packed, table, quantised, RankPart(lowered.cuts, lowered.whole_shapes, rank), factors)
        )
        for rank in range(lowered.num_ranks)
    )
