"""Compiles our own C++ for this machine's CPU (runtime/cpu/library.py) into a runtime, by the compiler of packages.

A library is the same for all models, so it is kept in the compilers' cache: it is compiled once a machine.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import CompileError
from mllm_compile.files.cache_folders import make_private
from mllm_compile.process.cpp_compiler import compiler_command
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.cpu.library import RUNTIME, CpuLibrary
from mllm_compile.store.locks import using_compiler_cache

LIBRARY_SUFFIX = ".so"
# Not -ffast-math: infinity is what masks are made of, and g++ would have the library change how the whole process
# rounds. -march=native is what packages are compiled with, and a factor of a runtime's key.
_OPTIONS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno")
_TIMEOUT_S = 600
_lock = threading.Lock()
_binaries: dict[str, bytes] = {}  # by the hash of source, compiler and options


def write_libraries(config: ResolvedConfig, libraries: Sequence[CpuLibrary], folder: Path, reporter: Reporter) -> None:
    """Writes each as `<its name>.so` into `folder`.

    Raises:
        CompileError: the compiler refuses one.
        ConfigError: the cache cannot be used.
    """
    with reporter.stage("C++ for the CPU"), using_compiler_cache(config.cache.dir) as kept:
        for library in libraries:
            (folder / (library.name + LIBRARY_SUFFIX)).write_bytes(compiled(library, kept / "cpu"))


def compiled(library: CpuLibrary, kept: Path) -> bytes:
    """The library's binary: this process's, or that in the folder `kept`, or compiled now.

    Raises:
        CompileError, ConfigError: as write_libraries.
    """
    command = compiler_command()
    if command is None:
        raise CompileError(f"there is no C++ compiler for {library.source}: install g++, or set {library.switch}")
    key = hashlib.sha256(
        "\0".join((library.text(), _version(command), torch.__version__, *_options(library))).encode()
    ).hexdigest()
    with _lock:
        if key not in _binaries:
            make_private(kept)
            _binaries[key] = _kept_binary(kept, key) or _compiled_into(kept, key, library, command)
        return _binaries[key]


def _kept_binary(kept: Path, key: str) -> bytes | None:
    """The binary that is kept; None: it is not there, or not as it was written (a crash may cut it short)."""
    for path in kept.glob(f"{key}-*{LIBRARY_SUFFIX}"):
        binary = path.read_bytes()
        if path.name == _file_name(key, binary):
            return binary
    return None


def _compiled_into(kept: Path, key: str, library: CpuLibrary, command: tuple[str, ...]) -> bytes:
    with TemporaryDirectory(dir=kept) as scratch:
        output = _compile(library, command, Path(scratch) / (key + LIBRARY_SUFFIX))
        binary = output.read_bytes()
        output.rename(kept / _file_name(key, binary))
    return binary


def _file_name(key: str, binary: bytes) -> str:
    return f"{key}-{hashlib.sha256(binary).hexdigest()[:16]}{LIBRARY_SUFFIX}"


def _compile(library: CpuLibrary, command: tuple[str, ...], output: Path) -> Path:
    try:
        done = subprocess.run(
            [*command, *_options(library), f"-I{RUNTIME}", str(library.path), "-o", str(output)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} does not compile {library.source}: {error}. Set {library.switch}.") from error
    if done.returncode or not output.is_file():
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()[:200]]
        raise CompileError(f"{command[0]} refuses {library.source}: {lines[0]}. Set {library.switch}, and report this.")
    os.chmod(output, 0o600)
    return output


def _options(library: CpuLibrary) -> list[str]:
    """The compiler's options; where ops are registered also those of torch, which is loaded where the library is."""
    if not library.registers_ops:
        return list(_OPTIONS)
    folder = Path(torch.__file__).parent
    return [*_OPTIONS, f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"]


@cache
def _version(command: tuple[str, ...]) -> str:
    """The macros that the compiler defines: its version, and the machine that it compiles for."""
    asked = [*command, "-march=native", "-dM", "-E", "-x", "c++", "-"]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, errors="replace", timeout=60, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileError(f"{command[0]} does not say what it compiles for: {error}. Install g++.") from error
    return done.stdout
