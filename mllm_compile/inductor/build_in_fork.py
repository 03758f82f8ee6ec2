"""Builds what packages share once: in a fork of the compiler process that begins before most is imported.

A compile that needs it waits for that fork, which holds a lock until it ends, and uses the output if there is one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def start(folder: Path, name: str, build: Callable[[], None]) -> None:
    """Calls `build` in a fork, whose errors are printed and no more.

    Args:
        folder: theirs alone; it exists until all waiting processes have ended.
        name: the name of the built thing; a file name.

    Raises:
        OSError: there are no locks on this file system, or there is no room for a process.
    """
    with open(_lock(folder, name), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the fork's too, until it ends
        if os.fork() == 0:
            _build_and_end(build, lock.fileno())


def wait(folder: Path, name: str) -> None:
    """Returns when the fork that builds it has ended, however it did."""
    with open(_lock(folder, name)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def compile_as_a_package(source: Path, device: str, **kind: Any) -> None:
    """Compiles C++ with what codecache.AotCodeCompiler tells the compiler of a package; to be called by `build`.

    The result is beside the source, has its name and a suffix, and is never incomplete.

    Args:
        device: the device that packages are compiled for.
        kind: the kind of output, flags as in CppTorchDeviceOptions.

    Raises:
        Exception: whatever Inductor raises where it does not compile.
    """
    import torch._inductor.config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import invalid_vec_isa

    from mllm_compile.inductor.toolchain import WRAPPER_OPTIONS, system_compiler

    with torch._inductor.config.patch(WRAPPER_OPTIONS), system_compiler():
        options = CppTorchDeviceOptions(
            aot_mode=True, device_type=device, vec_isa=invalid_vec_isa, min_optimize=True, **kind
        )
        builder = CppBuilder(name=f"{source}.new", sources=str(source), BuildOption=options)
        builder.build()
    compiled = Path(builder.get_target_file_path())
    compiled.rename(source.with_name(source.name + compiled.suffix))


def _lock(folder: Path, name: str) -> Path:
    return folder / f"{name}.lock"


def _build_and_end(build: Callable[[], None], lock: int) -> NoReturn:
    try:
        # Takes no requests off stdin, and holds no pipe whose end tells that the compiler process has ended.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, lock}:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(descriptor)
        build()
    except Exception:  # without it packages take longer, no more
        traceback.print_exc()
    finally:
        os._exit(0)
