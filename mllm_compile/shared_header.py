"""The C++ header of AOTInductor's packages, compiled once for all pieces of a compile, while nothing else can be.

Half of a package's time is g++: 4 to 5 s, of which reading the header takes 1.7, and 0.95 where it was compiled before
(torch 2.11, CUDA). Inductor can compile it ahead, but once a process, and each piece is compiled in one of its own; it
also reads the header again in each to find out whether it has changed, and keeps it where any user of the machine can
guess. Here a fork of the compiler process begins before most is imported, and whoever needs the header waits for that
fork. g++ takes what was compiled only where it was told the same there; otherwise it reads the header itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import traceback
from pathlib import Path
from typing import Any, NoReturn

_MIN_CORES = 4  # with fewer it takes as much time from the trace as it gives to the pieces


def pays(device: str) -> bool:
    """Whether a header is compiled: beside what else is done, and where Inductor has one to itself (on a CPU there is
    another for kernels)."""
    return device.startswith("cuda") and (os.cpu_count() or 1) >= _MIN_CORES


def share_header(folder: Path, device: str) -> None:
    """Starts to compile the header in a fork. The packages that other forks of this process compile wait for it.

    Args:
        folder: empty, theirs alone, and there until they have ended.
    """
    from torch._inductor import codecache

    with open(_lock(folder), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the fork's too, until it ends
        if os.fork() == 0:
            _compile_and_end(folder, device.partition(":")[0], lock.fileno())
    codecache._precompile_header = functools.partial(_shared, folder)  # type: ignore[assignment]


def is_shared() -> bool:
    from torch._inductor import codecache

    return getattr(codecache._precompile_header, "func", None) is _shared


def _shared(folder: Path, header: str, *rest: Any, **options: Any) -> str:
    """In place of Inductor's function: a header that includes `header`, compiled if that is the one."""
    with open(_lock(folder)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return str(_write(folder, header))


def _lock(folder: Path) -> Path:
    return folder / "header.lock"


def _write(folder: Path, header: str) -> Path:
    path = folder / header.replace("/", "_")
    if not path.exists():
        path.write_text(f"#include <{header}>\n", encoding="utf-8")
    return path


def _compile_and_end(folder: Path, device: str, lock: int) -> NoReturn:
    """The fork's part. The compiler is told what codecache.AotCodeCompiler tells it of a package."""
    try:
        # Nobody's requests are taken, and whoever waits for the compiler process' end does not wait for this one's.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, lock}:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(descriptor)
        import torch._inductor.config
        from torch._inductor.codecache import _get_cpp_wrapper_header
        from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
        from torch._inductor.cpu_vec_isa import invalid_vec_isa

        from mllm_compile.piece_compiler import WRAPPER_OPTIONS, system_compiler

        path = _write(folder, _get_cpp_wrapper_header(device, aot_mode=True))
        with torch._inductor.config.patch(WRAPPER_OPTIONS), system_compiler():
            options = CppTorchDeviceOptions(
                aot_mode=True, device_type=device, vec_isa=invalid_vec_isa, min_optimize=True, precompiling=True
            )
            builder = CppBuilder(name=f"{path}.new", sources=str(path), BuildOption=options)
            builder.build()
        compiled = Path(builder.get_target_file_path())
        compiled.rename(path.with_name(path.name + compiled.suffix))  # never half of it
    except Exception:  # without it packages take longer, no more
        traceback.print_exc()
    finally:
        os._exit(0)
