"""Reading a JSON object that came with a model: any damage is an error of the caller's kind, with the next step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mllm_compile.errors import MllmError


def read_json_object(path: Path, error_class: type[MllmError]) -> dict[str, Any] | None:
    """The object in a JSON file, None when there is no such file.

    Raises:
        error_class: the file cannot be read, is no JSON, or holds something other than an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise error_class(f"{path} cannot be read as JSON: {error}. Download it again.") from None
    if not isinstance(content, dict):
        raise error_class(f"{path} holds no JSON object. Download it again.")
    return content
