"""Compares the base model that an adapter names with the one that is served: only names on the hub say something."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mllm_compile.config.names import is_hub_id, repository_and_tag
from mllm_compile.errors import CheckpointError

# Marks of one model's weights in other forms: its adapters are the same.
_FORMS = re.compile(
    r"[-_.](?:unsloth|bnb|nf4|fp8|fp16|bf16|int[48]|w[48]a(?:8|16)|awq|gptq|gguf|hqq|autoround|dynamic|static|block|"
    r"quantized|marlin|[48]bit|g\d+|hf)$"
)


def check_base(named: str | None, source: str, path: Path) -> None:
    """Compares the base model that an adapter names with the one that is served, where both are of the hub.

    Args:
        named: base_model_name_or_path.
        path: the file that has it, for messages.

    Raises:
        CheckpointError: they are different models.
    """
    if named is None or not (_is_repository(named) and _is_repository(source)) or _model(named) == _model(source):
        return
    raise CheckpointError(
        f"{path}: the adapter is of {named}, and {source} is served. Serve that model, or, if the adapter fits this "
        "one too, remove base_model_name_or_path from the file"
    )


def _is_repository(text: str) -> bool:
    return is_hub_id(text) and "/" in text and not os.path.exists(text)  # Path.exists raises where a name is too long


def _model(repository: str) -> str:
    """The model's name without owner, and without what says in which form its weights are."""
    name = repository_and_tag(repository)[0].rpartition("/")[2].lower()
    while (shorter := _FORMS.sub("", name)) != name:
        name = shorter
    return name
