"""Compiles the C++ headers of AOTInductor's packages once for all pieces of a compile, while nothing else can be.

Half of a package's time is g++: 4 to 5 s. Reading the headers takes 1.7 of them, and 0.95 if they are precompiled
(torch 2.11, CUDA). Inductor can precompile them, but once a process, and each piece has a process of its own. It also
reads the header again in each to see if it has changed, and keeps it at a path that any user of the machine can guess.
Here a fork of the compiler process does (inductor/build_in_fork.py). g++ takes what was compiled only where it was told
the same there; otherwise it reads the headers itself.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from mllm_compile.inductor import build_in_fork
from mllm_compile.inductor.patches.shared_host_code import MODEL_HEADER

_MIN_CORES = 4  # with fewer it takes as much time from the trace as it gives to the pieces
_NAME = "header"


def pays(device: str) -> bool:
    """True if a header is compiled: if cores are free for it, and where Inductor has one to itself (on a CPU there is
    another for kernels)."""
    return device.startswith("cuda") and (os.cpu_count() or 1) >= _MIN_CORES


def share_header(folder: Path, device: str) -> None:
    """Starts to compile the header in a fork. The packages that other forks of this process compile wait for it.

    Args:
        folder: theirs alone, and there until they have ended.

    Raises:
        OSError: as build_in_fork.start.
    """
    from torch._inductor import codecache

    build_in_fork.start(folder, _NAME, functools.partial(_compile, folder, device.partition(":")[0]))
    codecache._precompile_header = functools.partial(_shared, folder)  # type: ignore[assignment]


def is_shared() -> bool:
    from torch._inductor import codecache

    return getattr(codecache._precompile_header, "func", None) is _shared


def _shared(folder: Path, header: str, *rest: Any, **options: Any) -> str:
    """Replaces Inductor's function: a header that includes `header`, compiled if that is the one."""
    build_in_fork.wait(folder, _NAME)
    return str(_write(folder, header))


def _write(folder: Path, header: str) -> Path:
    path = folder / header.replace("/", "_")
    if not path.exists():
        path.write_text(f"#include <{header}>\n#include <{MODEL_HEADER}>\n", encoding="utf-8")
    return path


def _compile(folder: Path, device: str) -> None:
    """Runs the fork's part."""
    from torch._inductor.codecache import _get_cpp_wrapper_header

    path = _write(folder, _get_cpp_wrapper_header(device, aot_mode=True))
    build_in_fork.compile_as_a_package(path, device, precompiling=True)
