"""Reading a YAML file: bounded, plain data only, each key once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mllm_compile.config.names import nearest_path
from mllm_compile.errors import ConfigError

_MAX_CONFIG_CHARACTERS = 1 << 20


class _OneKeyOnceLoader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key; YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"line {line}: a key is a list or a mapping; expected the name of a key")
            if key in seen:
                raise ConfigError(f"line {line}: the key {key!r} is there twice; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    try:
        with open(path, encoding="utf-8") as file:  # a named pipe too, as a shell makes of <(…)
            text = file.read(_MAX_CONFIG_CHARACTERS + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no such file{nearest_path(str(path))}; expected a YAML config") from None
    except IsADirectoryError:
        raise ConfigError("this is a folder; expected a YAML config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read as a text file: {error}") from None
    if len(text) > _MAX_CONFIG_CHARACTERS:
        raise ConfigError(f"has more than {_MAX_CONFIG_CHARACTERS:,} characters; expected a YAML config")
    try:
        # _OneKeyOnceLoader is a SafeLoader: it builds plain data only.
        content = yaml.load(text, Loader=_OneKeyOnceLoader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a ValueError: a malformed number or date
        raise ConfigError(f"not valid YAML: {_described(error)}") from None
    if content is None:
        raise ConfigError("the file is empty; it needs at least 'model: {path: …}'")
    return content


def _described(error: Exception) -> str:
    """One line, with the place as editors count it."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    begin = error.context_mark
    within = "" if error.context is None else f", {error.context}"
    if within and begin is not None and begin.line != error.problem_mark.line:
        within += f" that begins in line {begin.line + 1}"
    return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}{within}"
