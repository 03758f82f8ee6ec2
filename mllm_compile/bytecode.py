"""Python's bytecode of torch, Transformers and the rest, kept where the installation does not keep it.

Installers may leave compiling to the first import (uv does; pip with --no-compile), and in a container that import
often cannot write: PYTHONDONTWRITEBYTECODE is set, or the packages belong to another user. Then every process compiles
every module again: on such a machine 2.4 s of the 6.2 in which an engine started from its runtime.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec

from mllm_compile.cache_folders import auto_cache_dir, compiler_cache, make_private
from mllm_compile.errors import ConfigError


@contextmanager
def kept_bytecode() -> Iterator[None]:
    """Modules that are imported meanwhile are compiled once, into the user's cache, where torch's are not kept beside
    their sources. Whoever has set PYTHONPYCACHEPREFIX has a place of their own.
    """
    if sys.pycache_prefix is not None or _is_kept_beside("torch"):
        yield
        return
    before = sys.pycache_prefix, sys.dont_write_bytecode
    with contextlib.suppress(ConfigError, OSError):
        sys.pycache_prefix, sys.dont_write_bytecode = _folder(), False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def environment() -> dict[str, str]:
    """What makes a new Python process keep its bytecode where this one does at the moment."""
    if sys.pycache_prefix is None:
        return {}
    return {"PYTHONPYCACHEPREFIX": sys.pycache_prefix} | ({} if sys.dont_write_bytecode else {_NO_BYTECODE: ""})


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """What a model's compile imports is compiled by other processes, ahead of whoever imports it meanwhile, where that
    has not been done and is to be kept."""
    process = _start_compiling()
    try:
        yield
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended long ago
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start_compiling() -> subprocess.Popen[bytes] | None:
    workers = min(_MOST_WORKERS, (os.cpu_count() or 1) - 2)  # this process imports, and the compiler process does
    specs = [spec for spec in map(_spec, _AHEAD) if spec is not None]
    if sys.pycache_prefix is None or sys.dont_write_bytecode or workers < 2 or not specs or _is_compiled(specs[0]):
        return None
    folders = [os.path.dirname(spec.origin) for spec in specs if spec.origin is not None]
    return subprocess.Popen(
        [sys.executable, "-m", "compileall", "-qq", "-j", str(workers), "-x", _NOT_AHEAD, *folders],
        env=os.environ | environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )


# In the order in which they are needed. The first, which torch does not import, says whether it has been done.
_AHEAD = (
    "sympy",
    "torch._dynamo",
    "torch.distributed",
    "torch.fx",
    "mpmath",
    "transformers",
    "torch._inductor",
    "networkx",
)
_NOT_AHEAD = r"/(tests|testing|onnx|transformers/models)/"
_MOST_WORKERS = 8
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"  # counts where it is not empty


def _is_kept_beside(package: str) -> bool:
    """Whether its bytecode is there, or will be when it is imported."""
    spec = _spec(package)
    if spec is None or spec.origin is None or _is_compiled(spec):
        return True
    return not sys.dont_write_bytecode and os.access(os.path.dirname(spec.origin), os.W_OK)


def _spec(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ValueError, ModuleNotFoundError):  # it was put into sys.modules by hand; what it is in is not there
        return None


def _is_compiled(spec: ModuleSpec) -> bool:
    return spec.cached is None or os.path.exists(spec.cached)


def _folder() -> str:
    """Below what compilers keep: `mllm-compile cache prune` removes it with that."""
    compilers = compiler_cache(os.path.abspath(auto_cache_dir()[0]))
    make_private(compilers)
    return str(compilers / "bytecode")
