"""Texts that name a model or a config: a hub id, a folder, a YAML file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mllm_compile.config.mistakes import closest
from mllm_compile.files.user_path import user_path
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.weights.file_names import GGUF_SUFFIX

YAML_SUFFIXES = (".yaml", ".yml")


def source_name(source: str) -> str:
    """A short name of what config_or_runtime takes as text: `Qwen3-0.6B` of a hub id or folder, `tiny` of a YAML."""
    path = Path(os.path.abspath(source))
    return path.stem if path.suffix in (*YAML_SUFFIXES, GGUF_SUFFIX) else path.name


def is_hub_id(text: str) -> bool:
    """True if `text` can name a repository on the hub: `Qwen/Qwen3-0.6B`, or `gpt2` for a few old ones; or one of its
    GGUF files: `Qwen/Qwen3-0.6B-GGUF:Q8_0`."""
    if is_local_path(text) or repository_and_tag(text)[0].endswith(GGUF_SUFFIX):
        return False
    return re.fullmatch(r"[\w.-]+(/[\w.-]+(:[\w.-]+)?)?", text, re.ASCII) is not None


def repository_and_tag(hub_id: str) -> tuple[str, str | None]:
    """The repository, and the GGUF file that is named behind a colon, or None."""
    repository, _, tag = hub_id.partition(":")
    return repository, tag or None


def check_adapter_name(name: object) -> None:
    """
    Raises:
        ValueError: no adapter may have this name.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w./:@+-][\w ./:@+-]{0,199}", name):
        raise ValueError(f"an adapter's name of up to 200 letters, digits and . / : @ + - _; got {short_repr(name)}")


def nearest_path(text: str) -> str:
    """` (the nearest is …)` with the most similar name that exists, else nothing."""
    path = user_path(text)
    if path.is_symlink():
        return f" (it is a link to {os.readlink(path)}, which is gone)"
    try:
        near = closest(path.name, os.listdir(path.parent))
    except (OSError, ValueError):
        return ""
    return f" (the nearest is {path.parent / near})" if near else ""


def is_local_path(text: str) -> bool:
    """True when `model.path` can only mean a folder: absolute, or starting with `.`, `..`, `~` or `~name`."""
    return os.path.isabs(text) or text.startswith("~") or text.split("/", 1)[0] in (".", "..")


def served_name(source: str) -> str:
    """A model's name for clients, where none is given: its hub id, or the name of its folder or file."""
    is_name = is_hub_id(source) and not Path(source).exists()
    return source if is_name else source_name(source) or "model"
