"""Adapters that come with a model and compute its prompts with sounds: Granite Speech's and Phi-4-multimodal's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from mllm_compile.config.folders.hub import SPEECH_FOLDER
from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.schema import MAX_ADAPTER_RANK
from mllm_compile.errors import CheckpointError
from mllm_compile.files.json_file import read_json_object
from mllm_compile.runtime.short_repr import short_repr

OF_SOUNDS = "sounds"  # the name of such an adapter; one of lora.adapters with this name is in its place
HAS_OWN = "has_lora_adapter"
CONFIG_FILE = "adapter_config.json"
_DEFAULT_OF = "projector_config"  # of configs that have it the key is true, so that Transformers leaves it out


class OwnAdapter(NamedTuple):
    """Where it is, as PEFT writes it, and its highest rank."""

    folder: Path
    rank: int


def adapter_of_sounds(model: ModelFolder) -> OwnAdapter | None:
    """The adapter beside the model's weights, or in a folder of its own; None: config.json names none, or it is not
    there.

    Raises:
        CheckpointError: its config is damaged.
    """
    apart = "audio_config" in model.config and (model.path / SPEECH_FOLDER / CONFIG_FILE).is_file()
    folder = model.path / SPEECH_FOLDER if apart else model.path
    path = folder / CONFIG_FILE
    has_own = apart or model.config.get(HAS_OWN, _DEFAULT_OF in model.config)
    if not has_own or (said := read_json_object(path, CheckpointError)) is None:
        return None
    pattern = said.get("rank_pattern") or {}
    ranks: list[Any] = [said.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    if not all(isinstance(rank, int) and 0 < rank <= MAX_ADAPTER_RANK for rank in ranks):
        raise CheckpointError(
            f"{path}: expected ranks (r, rank_pattern) of 1 to {MAX_ADAPTER_RANK}, got {short_repr(ranks)}. "
            "Download it again"
        )
    return OwnAdapter(folder, max(ranks))
