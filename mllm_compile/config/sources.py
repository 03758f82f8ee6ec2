"""An engine's source: a config in any of its forms, or the folder of a compiled runtime."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mllm_compile.config.folders.hub import CONFIG_FILE
from mllm_compile.config.folders.other_formats import told_of_file
from mllm_compile.config.mistakes import key_meant_by, key_named, not_there, show
from mllm_compile.config.names import YAML_SUFFIXES, is_hub_id, nearest_path
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.schema_runtime import RuntimeConfig
from mllm_compile.errors import ArtifactError, ConfigError
from mllm_compile.files.json_file import read_json_object
from mllm_compile.files.user_path import user_path
from mllm_compile.runtime.config_sections import RuntimeSection
from mllm_compile.runtime.weights.file_names import GGUF_SUFFIX, is_gguf

# Files that identify a folder; store/artifact.py, which writes a runtime's, is above this module.
_RUNTIME_FILES = ("manifest.json", "program.json")
_EXPECTED = (
    "Expected a hub id such as Qwen/Qwen3-0.6B, a model's folder, a GGUF file, a YAML config, or the folder of a "
    "compiled runtime."
)
EngineSource = str | os.PathLike[str] | EngineConfig | dict[str, Any]


def config_or_runtime(source: EngineSource) -> EngineConfig | Path:
    """An engine's source: a config, validated, or the folder of a compiled runtime as it is.

    Args:
        source: a hub id, a model's folder, a GGUF file, a YAML file, a runtime's folder, an EngineConfig, or a dict of
            what a YAML would hold. The first three mean a config that sets `model.path` alone. Relative paths are taken
            from the current folder, but in a YAML from its own.

    Raises:
        ConfigError: it is of another kind, or the config is wrong.
    """
    if isinstance(source, EngineConfig):
        return source
    if isinstance(source, dict):
        return EngineConfig.from_dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"the model is {show(source)}; expected a hub id, a model's folder, a YAML file, a runtime's folder, an "
            "EngineConfig, or a dict such as {'model': {'path': …}}"
        )
    text = os.fspath(source)
    if not text:
        raise ConfigError(f"the model is an empty text. {_EXPECTED}")
    path = user_path(text)
    if os.path.isdir(path):
        return _model_or_runtime(path)
    if is_gguf(path) and os.path.isfile(path):
        return EngineConfig(model={"path": str(path)})
    if (said := told_of_file(path)) is not None:
        raise ConfigError(f"{text} {said}")
    if os.path.exists(path) or path.suffix in YAML_SUFFIXES:
        return EngineConfig.from_yaml(path)
    if is_hub_id(text):
        return EngineConfig(model={"path": text})
    raise ConfigError(f"{text}: there is no such file or folder{nearest_path(text)}. {_EXPECTED}")


def with_speculative(source: EngineConfig | Path, text: str | None) -> EngineConfig | Path:
    """The source with the section `speculative` of the option --speculative-config, a JSON object; None: as it is.

    Raises:
        ConfigError: the text is no object, a key of it is wrong, or the source is a runtime's folder: its config is
            fixed.
    """
    if text is None:
        return source
    if isinstance(source, Path):
        raise ConfigError(f"--speculative-config: {source} is a compiled runtime, whose config it has; give its model")
    keys = json_object("--speculative-config", text, '{"method": "ngram", "num_speculative_tokens": 3}')
    return EngineConfig.from_dict(source.model_dump(exclude_unset=True) | {"speculative": keys})


def json_object(option: str, text: str, example: str) -> dict[str, Any]:
    """The JSON object of an option.

    Raises:
        ConfigError: the text is none, or a key is there twice.
    """
    try:
        keys = json.loads(text, object_pairs_hook=partial(_keys_once, option))
    except json.JSONDecodeError:
        keys = None
    if not isinstance(keys, dict):
        raise ConfigError(f"{option} is {show(text)}; expected a JSON object such as {example}")
    return keys


def with_lora(source: EngineConfig | Path, keys: Mapping[str, Any]) -> EngineConfig | Path:
    """The source with these keys in its section `lora`; adapters are added to its own.

    Raises:
        ConfigError: a key is wrong, or the source is a runtime's folder: its config is fixed.
    """
    if not keys:
        return source
    if isinstance(source, Path):
        raise ConfigError(f"--enable-lora: {source} is a compiled runtime, whose config it has; give its model")
    own = source.lora.model_dump(exclude_unset=True)
    adapters = {**own.get("adapters", {}), **keys.get("adapters", {})}
    section = {**own, **keys, **({"adapters": adapters} if adapters else {})}
    return EngineConfig.from_dict(source.model_dump(exclude_unset=True) | {"lora": section})


def with_runtime(source: EngineConfig | Path, keys: Mapping[str, Any]) -> EngineConfig | Path:
    """The source with these keys in its section `runtime`, which options of their names give.

    Raises:
        ConfigError: a key is wrong, or the source is a runtime's folder: its config is fixed.
    """
    if not keys:
        return source
    if isinstance(source, Path):
        option = f"--{next(iter(keys)).replace('_', '-')}"
        raise ConfigError(f"{option}: {source} is a compiled runtime, whose config it has; give its model")
    section = source.runtime.model_dump(exclude_unset=True) | dict(keys)
    return EngineConfig.from_dict(source.model_dump(exclude_unset=True) | {"runtime": section})


def _keys_once(option: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """
    Raises:
        ConfigError: a key is there twice.
    """
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{option} has {show(twice[0])} twice; give it once")
    return dict(pairs)


def runtime_settings(source: EngineConfig | Path) -> RuntimeConfig | RuntimeSection | None:
    """The section `runtime` of what config_or_runtime gives; of a runtime's folder as its manifest has it, which nobody
    has checked yet. None: it has none, and opening it says what is wrong."""
    if isinstance(source, EngineConfig):
        return source.runtime
    try:
        manifest = read_json_object(source / _RUNTIME_FILES[0], ArtifactError) or {}
        return ResolvedConfig.model_validate(manifest.get("config")).runtime
    except (ArtifactError, ValueError):
        return None


def unknown_argument(name: str, known: Sequence[str]) -> ConfigError:
    """The error for an argument that an engine does not take: most are keys of its config, by vLLM's name or ours."""
    if name in ("model", "model_path"):
        return ConfigError(f"an engine has no argument {name}. Give the model first: Engine('Qwen/Qwen3-0.6B').")
    reason = not_there(name)
    if reason is not None:
        return ConfigError(f"an engine has no argument {name}: {reason}.")
    key = key_meant_by(name, EngineConfig)
    if key is None:
        return ConfigError(f"an engine has no argument {name}; known: {', '.join(known)}, and the keys of its config.")
    section, _, field = key.partition(":")[0].partition(".")
    keys = f"'path': …, '{field}': …}}" if section == "model" else f"'path': …}}, '{section}': {{'{field}': …}}"
    return ConfigError(
        f"an engine has no argument {name}; did you mean {key} of its config? Give that as a YAML, or a dict such as "
        f"{{'model': {{{keys}}}."
    )


def unknown_option(option: str) -> str | None:
    """Advice on an option that no command has, as `--max-model-len`: the config's key of that name, here or in vLLM.

    None where nobody knows it.
    """
    name = option.lstrip("-").replace("-", "_")
    reason = not_there(name)
    if reason is not None:
        return f"there is no option {option}: {reason}"
    key = key_named(name, EngineConfig)
    if key is None:
        return None
    key, _, value = key.partition(": ")
    section, _, field = key.partition(".")
    keys = f"{field}: {value or '…'}"
    text = f"model: {{path: …, {keys}}}" if section == "model" else f"model: {{path: …}}, {section}: {{{keys}}}"
    return f"{option} is no option, but {key} of the config: write {{{text}}} into a .yaml file, and give that as MODEL"


def _model_or_runtime(folder: Path) -> EngineConfig | Path:
    # One that this user may not enter could be a runtime: opening it says so.
    if not os.access(folder, os.X_OK) or any(os.path.isfile(folder / name) for name in _RUNTIME_FILES):
        return folder  # also one that lost its manifest: opening it says what it lacks
    if os.path.isfile(folder / CONFIG_FILE) or any(name.endswith(GGUF_SUFFIX) for name in os.listdir(folder)):
        return EngineConfig(model={"path": str(folder)})
    raise ConfigError(
        f"{folder}: this is a folder, but no model's (it holds no {CONFIG_FILE}) and no runtime's (no "
        f"{_RUNTIME_FILES[0]}). {_EXPECTED}"
    )
