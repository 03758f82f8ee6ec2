"""Refuses a tokenizer.json whose merges end the process when tokenizers reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mllm_compile.errors import CheckpointError

_KEY = "continuing_subword_prefix"


def _as_json_may_write(character: str) -> str:
    code = f"{ord(character):04x}"
    return rf"(?:{character}|\\u(?:{code}|{code.upper()}))"


# The key with a prefix behind it. Nearly no file has one, and only such a file is parsed: 1 s for 16 MB, where the
# search takes 30 ms.
_PREFIX = re.compile(('"' + "".join(map(_as_json_may_write, _KEY)) + r'"\s*+:\s*+(?!null|"")').encode())


def check_merges(data: bytes, path: Path) -> None:
    """Checks that the right side of each merge begins with the model's continuing_subword_prefix.

    tokenizers cuts as many bytes off as the prefix has, whatever they are, and takes the rest for text: within a
    character that ends the process (https://github.com/huggingface/tokenizers/pull/2398, there in 0.23).

    Args:
        data: what tokenizer.json holds.
        path: the file, as the message names it.

    Raises:
        CheckpointError: a merge's right side begins otherwise.
    """
    if not _PREFIX.search(data):
        return

    def check(pairs: list[tuple[str, Any]]) -> None:
        model = dict(pairs)
        if isinstance(prefix := model.get(_KEY), str):
            _check_model(prefix, model.get("merges"), path)

    # Data that Python would refuse and tokenizers skips unread must not end the search.
    text = data.decode(errors="replace")
    try:
        json.loads(text, strict=False, parse_int=float, object_pairs_hook=check)
    except (ValueError, RecursionError):
        return  # tokenizers says what is wrong with it


def _check_model(prefix: str, merges: Any, path: Path) -> None:
    for number, merge in enumerate(merges if isinstance(merges, list) else []):
        right = _right_side(merge)
        if right is not None and not right.startswith(prefix):
            raise CheckpointError(
                f"{path} is no valid tokenizer: the right side of merge {number}, {right[:40]!r}, does not begin with "
                f"the model's {_KEY}, {prefix[:40]!r}. Download it again."
            )


def _right_side(merge: Any) -> str | None:
    """The second token of ["a", "b"] or "a b", the two forms of a merge; None where it is neither."""
    tokens = merge.split(" ") if isinstance(merge, str) else merge
    if isinstance(tokens, list) and len(tokens) == 2 and isinstance(tokens[1], str):
        return tokens[1]
    return None
