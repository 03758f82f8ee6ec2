"""C++ headers compiled once for all pieces of a compile: half of a package's time is g++, and most of that is headers.

Inductor can compile its headers ahead, but once a process, and each piece is compiled in one of its own; it also reads
them again in each to find out whether they have changed, and keeps them where any user of the machine can guess.
Here the first fork that wants a header compiles it, others wait for that, and it goes when the compile has ended.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_MIN_CORES = 4  # with fewer it takes as much time from the trace as it gives to the pieces


def pays() -> bool:
    """Whether this machine has cores to compile a header beside what else is done."""
    return (os.cpu_count() or 1) >= _MIN_CORES


def share_headers(folder: Path) -> None:
    """Has the forks of this process compile headers into `folder`, which is theirs alone and outlives them."""
    from torch._inductor import codecache

    codecache._precompile_header = functools.partial(_compiled_once, folder)  # type: ignore[assignment]


def are_shared() -> bool:
    from torch._inductor import codecache

    return getattr(codecache._precompile_header, "func", None) is _compiled_once


def _compiled_once(folder: Path, header: str, command_line: str, **options: Any) -> str:
    """A header that includes `header`, which g++ reads as it was compiled or, where that failed, as it is.

    Args:
        command_line, options: which compiler this is, and what it is told.
    """
    name = hashlib.sha256(f"{header} {command_line} {options}".encode()).hexdigest()[:16]
    path = folder / f"{name}.h"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(f"#include <{header}>\n", encoding="utf-8")
            _compile(path, options)
    return str(path)


def _compile(path: Path, options: dict[str, Any]) -> None:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    try:
        told = CppTorchDeviceOptions(**options, precompiling=True)
        builder = CppBuilder(name=f"{path}.new", sources=str(path), BuildOption=told)
        builder.build()
        compiled = Path(builder.get_target_file_path())
        compiled.rename(path.with_name(path.name + compiled.suffix))  # never half of it
    except Exception:  # a compiler that cannot do that, a full disk
        logger.info("%s is read for every piece", path, exc_info=True)
