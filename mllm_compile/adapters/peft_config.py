"""Reads adapter_config.json: the part of PEFT's LoraConfig that is served, and a refusal by name of the rest.

The keys are PEFT 0.21's (peft/tuners/lora/config.py). No key is passed over in silence: one that changes answers
and is not served is refused, one that is unknown may only say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mllm_compile.errors import AdapterNotFoundError, CheckpointError, UnsupportedModelError
from mllm_compile.files.json_file import json_object, read_file
from mllm_compile.files.user_path import user_path
from mllm_compile.runtime.short_repr import short_repr

CONFIG_FILE = "adapter_config.json"
_MAX_BYTES = 16 << 20

SERVED = (
    "LoRA with r, lora_alpha, use_rslora, rank_pattern, alpha_pattern, target_modules, target_parameters, "
    "exclude_modules, layers_to_transform, layers_pattern and, of linears, use_dora"
)

_READ = {
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern",
    "alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "init_lora_weights", "target_parameters", "use_dora",
}  # fmt: skip
# Of training, or of how the base model stores its weights: tensors of an adapter are the same whatever these say.
_WITHOUT_EFFECT = {
    "lora_dropout", "inference_mode", "auto_mapping", "peft_version", "revision", "fan_in_fan_out", "runtime_config",
    "megatron_core", "qalora_group_size", "eva_config", "velora_config",
}  # fmt: skip
_REFUSED = {
    "bias": "biases of the base model that were trained",
    "lora_bias": "biases of adapters",
    "modules_to_save": "whole modules that were trained",
    "trainable_token_indices": "rows of embeddings that were trained",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "layers that are repeated",
    "ensure_weight_tying": "adapters that two modules share",
    "megatron_config": "Megatron's layers",
    "loftq_config": "LoftQ, which changes the base model",
    "corda_config": "CorDA, which changes the base model",
    "lora_ga_config": "LoRA-GA, which changes the base model",
    "arrow_config": "routing between adapters",
    "kasa_config": "KaSA, which changes the base model",
    "monteclora_config": "sampled adapters",
}
# Those that leave the base model as it is; others (pissa, olora, corda, loftq, lora_ga) subtract from it.
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")
_TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
_MOST_NAMES = 100_000
_MOST_CHARACTERS = 10_000
_MOST_OF_NAME = 1000


@dataclass(frozen=True)
class PeftConfig:
    """The config of an adapter.

    Attributes:
        base: the base model's name, as the trainer had it; None: it says none.
        rank, alpha: of modules that no pattern names.
        is_rank_stabilised: the scale is alpha / √r, not alpha / r.
        rank_pattern, alpha_pattern: regular expression → value; the first that fits a module's name counts.
        target_modules: a regular expression, or names that modules end with.
        target_parameters: names that parameters end with.
        exclude_modules: as target_modules.
        layers: numbers of layers that are targeted; None: all.
        layers_pattern: names of the lists of layers; empty: any.
        is_dora: each module's outputs have a magnitude too.
    """

    base: str | None
    rank: int
    alpha: float
    is_rank_stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    target_parameters: tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    is_dora: bool

    def scale(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def config_of_folder(folder: Path) -> tuple[bytes, PeftConfig]:
    """Reads an adapter's config alone: the bytes of its file, and what they say.

    Raises:
        UnsupportedModelError, CheckpointError: as read_peft_config; or the file is missing or no JSON.
    """
    path = folder / CONFIG_FILE
    text = read_file(path, CheckpointError, _MAX_BYTES)
    if text is None:
        expected = "expected a folder as PEFT's save_pretrained writes it"
        raise AdapterNotFoundError(f"{folder} has no {CONFIG_FILE}; {expected}")
    return text, read_peft_config(json_object(text, path, CheckpointError), path)


def check_folders(folders: Iterable[str]) -> None:
    """Reads the configs of adapters, before a model is compiled for them.

    Raises:
        UnsupportedModelError, CheckpointError: as config_of_folder.
    """
    for folder in folders:
        config_of_folder(user_path(folder))


def read_peft_config(fields: Mapping[str, Any], path: Path) -> PeftConfig:
    """Checks the object of an adapter_config.json.

    Args:
        path: the file, for messages.

    Raises:
        UnsupportedModelError: it asks for something that is not served.
        CheckpointError: a value is malformed.
    """
    _check_served(fields, path)
    read = _Reader(fields, path)
    targets = read.names("target_modules")
    parameters = read.names("target_parameters")
    if isinstance(parameters, str):
        raise read.mistake("target_parameters", "a list of names")
    if not targets and not parameters:
        raise read.mistake("target_modules", "a list of names, or a regular expression")
    layers = fields.get("layers_to_transform")
    if layers is not None:
        layers = [layers] if type(layers) is int else layers
        if not isinstance(layers, list) or not all(type(number) is int for number in layers):
            raise read.mistake("layers_to_transform", "a number or a list of numbers")
    patterns = read.names("layers_pattern")
    return PeftConfig(
        base=read.text("base_model_name_or_path"),
        rank=read.rank(fields.get("r", 8), "r"),
        alpha=read.alpha(fields.get("lora_alpha", 8), "lora_alpha"),
        is_rank_stabilised=read.flag("use_rslora"),
        rank_pattern={key: read.rank(value, "rank_pattern") for key, value in read.pattern("rank_pattern")},
        alpha_pattern={key: read.alpha(value, "alpha_pattern") for key, value in read.pattern("alpha_pattern")},
        target_modules=targets,
        target_parameters=parameters,
        exclude_modules=read.names("exclude_modules"),
        layers=frozenset(layers) if layers else None,
        layers_pattern=(patterns,) if isinstance(patterns, str) else patterns,
        is_dora=read.flag("use_dora"),
    )


def _check_served(fields: Mapping[str, Any], path: Path) -> None:
    def refusal(what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{path}: {what} is not served. Served: {SERVED}. Merge it into its model instead")

    kind = fields.get("peft_type")
    if kind != "LORA":
        raise refusal(f"peft_type {short_repr(kind)}")
    if fields.get("task_type") not in _TASKS:
        raise refusal(f"task_type {short_repr(fields['task_type'])}")
    init = fields.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise refusal(f"init_lora_weights {short_repr(init)}, under which the base model was changed,")
    for key, value in fields.items():
        if key in _READ or key in _WITHOUT_EFFECT or value in _EMPTY or (key == "bias" and value == "none"):
            continue
        raise refusal(f"{short_repr(key)} ({_REFUSED.get(key, 'a key that is not known')})")


class _Reader:
    """Reads fields, and says which one is wrong."""

    def __init__(self, fields: Mapping[str, Any], path: Path) -> None:
        self._fields = fields
        self._path = path

    def mistake(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {key}: expected {expected}, got {short_repr(self._fields.get(key))}. Download it again"
        )

    def text(self, key: str) -> str | None:
        value = self._fields.get(key)
        if value is not None and not (isinstance(value, str) and len(value) <= _MOST_OF_NAME):
            raise self.mistake(key, f"a text of up to {_MOST_OF_NAME:,} characters")
        return value or None

    def flag(self, key: str) -> bool:
        value = self._fields.get(key)
        if value not in (None, True, False):
            raise self.mistake(key, "true or false")
        return bool(value)

    def names(self, key: str) -> str | tuple[str, ...]:
        """A text, or a list of texts; () where the key says nothing."""
        value = self._fields.get(key) or ()
        texts = [value] if isinstance(value, str) else value
        is_list = isinstance(texts, list | tuple) and len(texts) <= _MOST_NAMES
        if not is_list or not all(isinstance(one, str) and 0 < len(one) <= _MOST_CHARACTERS for one in texts):
            raise self.mistake(key, f"a text, or a list of texts, of up to {_MOST_CHARACTERS:,} characters")
        return value if isinstance(value, str) else tuple(value)

    def pattern(self, key: str) -> list[tuple[str, Any]]:
        value = self._fields.get(key) or {}
        if not isinstance(value, dict) or len(value) > _MOST_NAMES or not all(0 < len(one) <= 1000 for one in value):
            raise self.mistake(key, "an object of names and numbers")
        return list(value.items())

    def rank(self, value: Any, key: str) -> int:
        if type(value) is not int or not 0 < value < 2**31:
            raise self.mistake(key, "a whole number above 0")
        return value

    def alpha(self, value: Any, key: str) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.mistake(key, "a number")
        return float(value)
