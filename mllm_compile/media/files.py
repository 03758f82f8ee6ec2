"""The files of a model's folder that its processor is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mllm_compile.media.prompt import MediaKind  # which imports numpy: a command's help has no use for it

CONFIG_FILE = "config.json"
_TOWERS = {"image": "vision", "video": "vision", "audio": "audio"}
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def placeholder_of(config: Mapping[str, Any], kind: MediaKind) -> int | None:
    """The id of the token that features replace, by the model's config or its tower's, or None."""
    own = config.get(f"{_TOWERS[kind]}_config")
    tower = own if isinstance(own, dict) else {}
    name = f"{kind}_token_id"
    found = config.get(name, config.get(f"{kind}_token_index", tower.get(name)))
    return found if isinstance(found, int) else None
