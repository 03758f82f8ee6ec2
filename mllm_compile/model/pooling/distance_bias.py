"""Bias of attention that depends on distance alone, as T5 has it: a table [H, 2R + 1] of weights.

Distances beyond R share one bucket, so the table is short and exact. Modules are known by what they have: a weight
`relative_attention_bias`, and a function from distances to buckets.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mllm_compile.model.pooling.own_attention import attends_itself


class DistanceTables:
    """The tables of a model.

    Args:
        owners: attention → the module whose table it adds; its own, or the first layer's for all.
        farthest: R.
    """

    def __init__(self, owners: dict[torch.nn.Module, torch.nn.Module], farthest: int) -> None:
        self._owners, self._farthest = owners, farthest

    def of(self, module: torch.nn.Module) -> torch.Tensor | None:
        """The table [H, 2R + 1] of an attention; None: it has none. Called within a trace."""
        owner: Any = self._owners.get(module)
        if owner is None:
            return None
        weight: torch.Tensor = owner.relative_attention_bias.weight
        far = torch.arange(-self._farthest, self._farthest + 1, device=weight.device)
        table: torch.Tensor = owner.relative_attention_bias(_buckets(owner, far)).T
        return table


def distance_tables(model: torch.nn.Module) -> DistanceTables:
    """Finds the tables of a model's attention."""
    owners: dict[torch.nn.Module, torch.nn.Module] = {}
    farthest, last = 1, None
    for module in model.modules():
        if hasattr(module, "relative_position_bucket") and hasattr(module, "relative_attention_bias"):
            last = module  # an encoder whose layers share its table
            farthest = max(farthest, _default_of(module.relative_position_bucket, "max_distance"))
        elif attends_itself(module) and last is not None:
            owners[module] = last
        if not hasattr(module, "_relative_position_bucket"):
            continue
        if hasattr(module, "relative_attention_bias"):
            last = module
            farthest = max(farthest, int(module.relative_attention_max_distance))  # type: ignore[arg-type]
        if last is not None:
            owners[module] = last
    return DistanceTables(owners, farthest)


def _buckets(module: Any, far: torch.Tensor) -> torch.Tensor:
    function = getattr(module, "_relative_position_bucket", None)
    if function is None:
        shared: torch.Tensor = module.relative_position_bucket(far)
        return shared
    said: dict[str, Any] = {}
    if "bidirectional" in inspect.signature(function).parameters:
        said["bidirectional"] = not module.is_decoder
        said["num_buckets"] = module.relative_attention_num_buckets
        said["max_distance"] = module.relative_attention_max_distance
    buckets: torch.Tensor = function(far, **said)
    return buckets


def _default_of(function: Any, name: str) -> int:
    return int(inspect.signature(function).parameters[name].default)
