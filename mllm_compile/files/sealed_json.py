"""JSON files that carry their own sha256, so that a changed byte anywhere in them is seen.

The seal finds damage, not forgery: anyone who can write the file can seal it anew. The folder's owner and mode protect
against that (trusted_folder.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mllm_compile.errors import ArtifactError
from mllm_compile.runtime.files.json_data import parse_json

_SEAL = "sha256"


def seal(body: Mapping[str, Any]) -> bytes:
    """The file's bytes: `body`, then the hash over it."""
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps({**body, _SEAL: digest}, indent=1) + "\n").encode()


def unseal(data: bytes, path: Path) -> dict[str, Any]:
    """The object that `seal` was given.

    Raises:
        ArtifactError: the bytes are not those that `seal` made of what they say.
    """
    try:
        content = parse_json(data)
    except ValueError as error:
        raise ArtifactError(f"{path} is no JSON ({error}); compile the model again") from None
    if not isinstance(content, dict):
        raise ArtifactError(f"{path} holds no object; compile the model again")
    body = {name: value for name, value in content.items() if name != _SEAL}
    if seal(body) != data:
        raise ArtifactError(f"{path} has changed since it was written; compile the model again")
    return body


def write_sealed(path: Path, body: Mapping[str, Any]) -> None:
    """Writes atomically: a reader, or another writer, sees one whole file or another."""
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(seal(body))
            os.fchmod(handle, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
