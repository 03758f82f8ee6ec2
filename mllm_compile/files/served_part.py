"""The part of a config.json that is served: of a whole Omni model, which also speaks, its thinker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SERVED_PART = "thinker_config"


def served_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section of the part that answers with text; all of a config without one."""
    part = config.get(SERVED_PART)
    return dict(part if isinstance(part, dict) else config)
