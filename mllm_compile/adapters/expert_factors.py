"""The factors of experts in an adapter's file: PEFT's target_parameters, of weights that are stacked.

PEFT wraps a module once for each of its parameters that is targeted, in the module's order. So a file has these one in
the other, and names the modules alone (peft 0.21, ParamWrapper in tuners/lora/layer.py).

Shape legend: E experts, r rank, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mllm_compile.adapters.base_model import BaseModel
from mllm_compile.adapters.module_names import ModuleNames
from mllm_compile.adapters.peft_config import CONFIG_FILE
from mllm_compile.adapters.tensor_names import Factors
from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.runtime.short_repr import short_repr

_WRAPPED = ".base_layer"


def with_parameters(
    factors: Mapping[str, Factors], names: ModuleNames, base: BaseModel, path: Path
) -> dict[str, Factors]:
    """The factors; experts' have the names of their parameters, and the rank of one expert.

    Args:
        path: the file, for messages.

    Raises:
        UnsupportedModelError: a parameter is not of experts.
        CheckpointError: a module has more factors than CONFIG_FILE targets, or not as many as experts.
    """
    for name in names.parameters:
        if not any(one == name or one.endswith(f".{name}") for one in base.experts):
            raise UnsupportedModelError(
                f"{path.with_name(CONFIG_FILE)}: target_parameters has {short_repr(name)}, which is not served; served "
                f"are {', '.join(base.target_names)}. Name experts in lora.targets if it is theirs, or merge it into "
                "its model"
            )
    siblings = {weight.rpartition(".")[0]: one.siblings for weight, one in base.experts.items()}
    found = {}
    for module, one in factors.items():
        owner = module
        while owner.endswith(_WRAPPED):
            owner = owner.removesuffix(_WRAPPED)
        if owner not in siblings:
            if owner != module:
                raise UnsupportedModelError(
                    f"{path}: {module} is a tensor of the base model, or an adapter of a parameter, which is not "
                    "served. Name experts in lora.targets if it is one of theirs, or merge it into its model"
                )
            found[module] = one
            continue
        targeted = [f"{owner}.{name}" for name in siblings[owner] if names.are_parameters(f"{owner}.{name}")]
        depth = module.count(_WRAPPED, len(owner))
        if depth >= len(targeted):
            raise CheckpointError(
                f"{path} has factors of {depth + 1} parameters of {owner}; target_parameters in {CONFIG_FILE} are "
                f"{len(targeted)} of them. Download it again"
            )
        parameter = targeted[-1 - depth]
        found[parameter] = _of_one_expert(one, parameter, base, path)
    return found


def _of_one_expert(one: Factors, parameter: str, base: BaseModel, path: Path) -> Factors:
    experts = base.experts.get(parameter)
    if experts is None:
        return one  # refused by its name
    if one.rows % experts.num_experts:
        raise CheckpointError(
            f"{path}: {parameter} has factors of {one.rows} rows; expected a multiple of the {experts.num_experts} "
            f"experts of {base.source}, so the adapter is another model's"
        )
    return one._replace(num_experts=experts.num_experts)


def by_expert(down: torch.Tensor, up: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, r, K] and B [E, N, r] of A [E * r, K] and B [N, r * E]."""
    ups = up.unflatten(1, (-1, num_experts)).permute(2, 0, 1).contiguous()
    return down.unflatten(0, (num_experts, -1)), ups
