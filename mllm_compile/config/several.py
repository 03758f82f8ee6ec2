"""Several models by name, as a server's command line gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mllm_compile.config.names import YAML_SUFFIXES, served_name
from mllm_compile.config.sources import config_or_runtime
from mllm_compile.errors import ConfigError
from mllm_compile.files.user_path import user_path

_NAMED = re.compile(r"([^/=\\]+)=(.+)")
MOST_MODELS = 64


def is_folder_of_yamls(given: str) -> bool:
    """True for a folder that holds YAMLs, and nothing that makes it a model's."""
    folder = user_path(given)
    return folder.is_dir() and not (folder / "config.json").exists() and bool(_yamls_of(folder))


def named_models(given: Sequence[str]) -> Mapping[str, str]:
    """Name → source, in their order.

    Args:
        given: each MODEL, NAME=MODEL, or a folder of YAMLs, each named as its file.

    Raises:
        ConfigError: two have one name, there are too many, or one is a compiled runtime.
    """
    models: dict[str, str] = {}
    for name, source in (pair for text in given for pair in _pairs_of(text)):
        if name in models:
            raise ConfigError(
                f"{models[name]} and {source} are both named {name}, which requests could not tell apart. Give one "
                f"another name, as in other={source}"
            )
        models[name] = source
    if len(models) > MOST_MODELS:
        raise ConfigError(f"a server has at most {MOST_MODELS} models, got {len(models)}")
    return models


def _pairs_of(text: str) -> list[tuple[str, str]]:
    if is_folder_of_yamls(text):
        return [(path.stem, str(path)) for path in _yamls_of(user_path(text))]
    named = None if user_path(text).exists() else _NAMED.fullmatch(text)
    given, source = named.groups() if named else (None, text)
    config = config_or_runtime(source)
    if isinstance(config, Path):
        raise ConfigError(
            f"{source}: a compiled runtime has the memory that it was compiled for. Give its model beside others"
        )
    return [(given or served_name(config.model.path), source)]


def _yamls_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in YAML_SUFFIXES and path.is_file())
