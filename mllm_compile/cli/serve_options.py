"""Keys that options of `mllm-compile serve` give: of a config's sections, and of clients."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.sources import json_object, runtime_settings
from mllm_compile.errors import ConfigError
from mllm_compile.kv_events.installed import check_installed
from mllm_compile.runtime.config_sections import KVEventsSection

if TYPE_CHECKING:
    from mllm_compile.server.options import ServeOptions

PLACES = 4  # for adapters
_KEY_VARIABLE = "MLLM_API_KEY"
# Options whose value is an object, and one.
_OBJECTS = {
    "kv_transfer_config": '{"kv_connector": "PeerConnector", "kv_role": "kv_producer"}',
    "kv_events_config": '{"topic": "kv@pod@model"}',
}


def runtime_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the section runtime that options give.

    Args:
        given: an option's value by its key; None: it is not given.

    Raises:
        ConfigError: one that is to be an object is none.
    """
    keys = {name: value for name, value in given.items() if value is not None}
    for name, example in _OBJECTS.items():
        if name in keys:
            keys[name] = json_object(f"--{name.replace('_', '-')}", keys[name], example)
    return keys


def kv_events(sources: Iterable[EngineConfig | Path]) -> dict[str, Any]:
    """The settings of KV events, which this process publishes; of the first model that has any."""
    for source in sources:
        settings = runtime_settings(source)
        if settings is None:
            continue
        own = settings.kv_events_config
        section = own if isinstance(own, KVEventsSection) else KVEventsSection(**own.model_dump())
        if section.is_on:
            check_installed()
            return {"kv_events": section, "kv_event_ranks": settings.expert_parallel_size}
    return {}


def check_adapters(source: EngineConfig, options: ServeOptions) -> None:
    """
    Raises:
        ConfigError: no request could name an adapter, or no client load one.
        MllmError: the config of an adapter is not there, or is refused.
    """
    from mllm_compile.adapters.peft_config import check_folders
    from mllm_compile.server.names import own_names

    if options.allow_runtime_lora and not source.lora.max_adapters:
        raise ConfigError("--allow-runtime-lora: expected --enable-lora beside it, or lora.max_adapters in the config")
    names = own_names(options.served_names, source.model.path)
    if same := next((name for name in source.lora.adapters if name in names), None):
        raise ConfigError(
            f"--lora-modules, lora.adapters: {same!r} is the model's own name, which requests mean by it. Give the "
            "adapter another name, or the model one by --served-model-name"
        )
    check_folders(source.lora.adapters.values())


def lora_keys(
    is_on: bool, most: int | None, rank: int | None, modules: Sequence[str], places: int = PLACES
) -> dict[str, Any]:
    """The keys of the section lora that options give.

    Args:
        places: for adapters, where `most` does not say it.

    Raises:
        ConfigError: an adapter is no NAME=PATH, or is named twice.
    """
    adapters: dict[str, str] = {}
    for module in modules:
        name, equals, path = module.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--lora-modules: expected NAME=PATH, got {module!r}")
        if name in adapters:
            raise ConfigError(f"--lora-modules: {name!r} is there twice; give each name once")
        adapters[name] = os.path.abspath(os.path.expanduser(path))
    if not is_on:
        given = {"--max-loras": most, "--max-lora-rank": rank, "--lora-modules": adapters or None}
        if wrong := next((option for option, value in given.items() if value is not None), None):
            raise ConfigError(f"{wrong}: expected --enable-lora beside it")
        return {}
    keys: dict[str, Any] = {"max_adapters": places if most is None else most}
    return keys | ({} if rank is None else {"max_rank": rank}) | ({"adapters": adapters} if adapters else {})


def other_keys(file: Path | None) -> list[str]:
    """Keys of the environment and of a file."""
    variable = os.environ.get(_KEY_VARIABLE)
    if variable is not None and not variable.strip():  # of a secret that is not there; all paths would be open
        raise ConfigError(f"{_KEY_VARIABLE} is set, and empty; give it a key, or unset it to serve without one")
    keys = [] if variable is None else [variable]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file: {file} cannot be read ({error})") from None
        from_file = [line.strip() for line in lines if line.strip()]
        if not from_file:
            raise ConfigError(f"--api-key-file: {file} has no key; expected one a line")
        keys += from_file
    return keys
