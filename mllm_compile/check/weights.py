"""The weights that a self-check gives to Transformers' model and to the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.passes.base import QuantisedTensor, part_of_rank
from mllm_compile.runtime.ops.panels.layout import put_in_panels
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import WeightScheme

if TYPE_CHECKING:
    from mllm_compile.compiler.lowered import Lowered


def quantise_weights(
    model: Any, by_name: dict[str, torch.Tensor], tensors: Mapping[str, QuantisedTensor]
) -> dict[str, torch.Tensor]:
    """Adds the tensors of quantised weights to the model's, and gives the model the numbers that they encode. Layers
    share them, as they share what was quantised."""
    done: dict[tuple[int, WeightScheme], tuple[dict[str, torch.Tensor], torch.nn.Parameter]] = {}
    found = dict(by_name)
    for name, tensor in tensors.items():
        weight, scheme = by_name[tensor.weight_name], tensor.scheme
        key = weight.data_ptr(), scheme
        if key not in done:
            rows = weight.transpose(-1, -2) if tensor.is_transposed else weight
            parts = quantised(rows, scheme)
            stands_for = dequantised(parts, scheme.kind, scheme.group, rows.shape[-1], weight.dtype)
            stands_for = stands_for.transpose(-1, -2).contiguous() if tensor.is_transposed else stands_for
            done[key] = parts, torch.nn.Parameter(stands_for, requires_grad=False)
        parts, parameter = done[key]
        found[name] = parts[tensor.role]
        # Of a tied head the input is called after the head, and the embedding keeps its numbers.
        owner, _, leaf_name = name.removesuffix(f"_{tensor.role}").rpartition(".")
        setattr(model.get_submodule(owner), leaf_name, parameter)
    return found


def program_weights(
    by_name: Mapping[str, torch.Tensor], program: Program, lowered: Lowered, rank: int
) -> dict[str, torch.Tensor]:
    """The model's weights as a rank's program wants them: its parts of them, and packed ones concatenated; once for
    those that layers share."""
    made: dict[Any, torch.Tensor] = {}
    bound = {}
    inputs = {node.meta.get("weight_name"): node for node in lowered.graph.graph.find_nodes(op="placeholder")}

    def as_it_lies(name: str, weight: torch.Tensor) -> torch.Tensor:
        if (unit := program.panels.get(name)) is None:
            return weight
        key = weight.data_ptr(), "panels"
        if key not in made:
            made[key] = weight.clone(memory_format=torch.contiguous_format)
            put_in_panels(made[key], unit)
        return made[key]

    def part(name: str) -> torch.Tensor:
        cuts = lowered.cuts_of(name)
        key = by_name[name].data_ptr(), cuts
        if key not in made:
            made[key] = part_of_rank(by_name[name], cuts, rank).contiguous() if cuts else by_name[name]
        return made[key]

    for name in program.weights:
        if name not in lowered.packed:
            bound[name] = as_it_lies(name, part(name))
            continue
        parts, rows = lowered.packed[name], inputs[name].meta["val"].shape[0]
        members = [part(one.weight_name) for one in parts]
        key = rows, *((one.start, member.data_ptr()) for one, member in zip(parts, members, strict=True))
        if key not in made:
            made[key] = members[0].new_zeros((rows, *members[0].shape[1:]))  # of a bias not all linears have rows
            for one, member in zip(parts, members, strict=True):
                made[key][one.start : one.start + one.rows] = member
        bound[name] = as_it_lies(name, made[key])
    return bound
