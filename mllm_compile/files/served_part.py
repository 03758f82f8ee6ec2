"""The part of a config.json that is served: of a whole Omni model, which also speaks, its thinker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SERVED_PART = "thinker_config"
# What a whole model's config says of all its weights, unless the section says it too.
_OF_ALL_PARTS = ("quantization_config", "compression_config", "quantization", "dtype", "torch_dtype")


def served_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section of the part that answers with text, with what is said of all parts; all of a config without one."""
    part = config.get(SERVED_PART)
    if not isinstance(part, dict):
        return dict(config)
    return {name: config[name] for name in _OF_ALL_PARTS if name in config} | part
