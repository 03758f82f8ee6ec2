"""The base of the config's sections, and the types of their keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from mllm_compile.config.names import is_local_path
from mllm_compile.files.user_path import is_homeless, user_path
from mllm_compile.runtime.config_sections import Switch
from mllm_compile.runtime.weights.file_names import is_gguf


def _checked_path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("a path: a text that is not empty and has no null byte")
    if is_homeless(text):
        raise ValueError("a path from / on, or below a home folder that is known")
    return text


Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
PathText = Annotated[
    str,
    BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value),
    AfterValidator(_checked_path),
]
_LIST_IS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
NameList = Annotated[tuple[str, ...], _LIST_IS_TUPLE]
NamePair = Annotated[tuple[str, str], _LIST_IS_TUPLE]
SizeList = Annotated[tuple[PositiveInt, ...], _LIST_IS_TUPLE]
SwitchList = Annotated[tuple[Switch, ...], _LIST_IS_TUPLE]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent conversion (`"16"` is no 16, 1 is no `true`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def without_repeats(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """The items; a ValueError says which is there twice."""
    for item in items:
        if items.count(item) > 1:
            raise ValueError(f"each entry once, but {item!r} is there {items.count(item)} times")
    return items


def anchored_model_path(text: str, folder: Path) -> str:
    """The whole path of a model beside a file of this folder; a hub id as it is."""
    candidate = os.path.normpath(folder / user_path(text))
    is_there = os.path.isdir(candidate) or (is_gguf(Path(candidate)) and os.path.isfile(candidate))
    return candidate if is_local_path(text) or is_there else text
