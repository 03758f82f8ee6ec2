"""The length up to which RoPE that follows the longest text of a batch (`dynamic`, `longrope`) is constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeLimit:
    """A rope_type that follows the longest text, and the number of positions up to which it is constant."""

    rope_type: str
    max_positions: int


def rope_limit(look_up: Callable[..., Any]) -> RopeLimit | None:
    """The RoPE limit of a config; None where RoPE is constant at any length, or no length is given.

    Args:
        look_up: gives the config's first value of some names, or None.
    """
    rope = look_up("rope_parameters", "rope_scaling")
    if not isinstance(rope, dict):
        return None
    by_kind_of_layer = [value for value in rope.values() if isinstance(value, dict)]
    limits = [_limit(parameters, look_up) for parameters in by_kind_of_layer or [rope]]
    return min((limit for limit in limits if limit), key=lambda limit: limit.max_positions, default=None)


def _limit(parameters: dict[str, Any], look_up: Callable[..., Any]) -> RopeLimit | None:
    rope_type = parameters.get("rope_type", parameters.get("type"))
    if rope_type == "su":  # its first name
        rope_type = "longrope"
    if rope_type == "dynamic":
        length = look_up("max_position_embeddings")
    elif rope_type == "longrope":
        length = look_up("original_max_position_embeddings")
        length = length or parameters.get("original_max_position_embeddings") or look_up("max_position_embeddings")
    else:
        return None
    return RopeLimit(rope_type, length) if isinstance(length, int) else None
