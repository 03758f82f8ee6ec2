"""The GGUF file of a hub's repository that a hub id means: `OWNER/REPOSITORY:Q4_K_M`, as llama.cpp and vLLM have it.

A tag is how the file is quantised, as its name says it, or the name. Without one a repository of one model means that,
and of several the one in Q4_K_M, as llama.cpp takes it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from mllm_compile.errors import ModelNotFoundError
from mllm_compile.gguf.parts import first_parts, is_named_as_model, part_names
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.weights.file_names import is_gguf

_log = logging.getLogger("mllm_compile.config")
_USUAL = "Q4_K_M"
_MOST_NAMES = 6  # of an error


def chosen_files(names: Iterable[str], tag: str | None, hub_id: str) -> list[str]:
    """The files of the model that is meant, the first part first; none where the repository has no GGUF files.

    Args:
        names: of all files of the repository, with folders.
        tag: of the hub id.
        hub_id: for errors.

    Raises:
        ModelNotFoundError: there is no such model, or several.
    """
    paths = [path for name in names if is_gguf(path := PurePosixPath(name)) and is_named_as_model(path.name)]
    firsts = [path for path in paths if first_parts([path.name])]
    if not firsts and tag is None:
        return []
    found = firsts
    if tag is not None:
        found = [path for path in firsts if path.name == tag] or [path for path in firsts if _is_tagged(path, tag)]
    elif len(firsts) > 1:
        found = [path for path in firsts if _is_tagged(path, _USUAL)] or firsts
    if len(found) != 1:
        raise ModelNotFoundError(_not_one(found, firsts, tag, hub_id))
    if tag is None and len(firsts) > 1:
        _log.info("%s: of %d GGUF models %s is taken", hub_id, len(firsts), found[0])
    return [str(found[0].with_name(name)) for name in part_names(found[0].name)]


def _is_tagged(path: PurePosixPath, tag: str) -> bool:
    """True if the name has the tag as words of its own, in upper or lower case."""
    return re.search(rf"(?:^|[-._]){re.escape(tag)}(?:[-.]|$)", path.stem, re.IGNORECASE) is not None


def _not_one(found: list[PurePosixPath], firsts: list[PurePosixPath], tag: str | None, hub_id: str) -> str:
    shown = ", ".join(str(path) for path in (found or firsts)[:_MOST_NAMES]) or "none at all"
    more = f" and {len(found or firsts) - _MOST_NAMES} more" if len(found or firsts) > _MOST_NAMES else ""
    what = (
        f"several GGUF models ({shown}{more})" if found else f"no GGUF model named {short_repr(tag)}, but {shown}{more}"
    )
    repository = hub_id.partition(":")[0]
    return (
        f"model.path {hub_id!r}: the repository has {what}. Name one as {repository}:Q8_0, or by the whole name of its "
        "file."
    )
