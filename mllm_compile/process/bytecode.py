"""Keeps Python's bytecode of torch, Transformers and the rest, if the installation does not.

Installers may leave compiling to the first import (uv does; pip with --no-compile), and in a container that import
often cannot write: PYTHONDONTWRITEBYTECODE is set, or the packages belong to another user. Then every process compiles
every module again: on such a machine 2.4 s of the 6.2 s that an engine took to start from its runtime.

It is in the user's cache, also where a config names another: modules are imported before any config is read.

Where torch's bytecode is there and this project's is not, as in a checkout under PYTHONDONTWRITEBYTECODE, its own alone
is kept so: compiling it is a fifth of a warm start's CPU time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from mllm_compile.errors import ConfigError
from mllm_compile.files.cache_folders import auto_cache_dir, bytecode_cache, make_private
from mllm_compile.process.group import ProcessGroup
from mllm_compile.process.hashed_bytecode import HashedLoader, load_ours

_setting = threading.Lock()


@contextmanager
def kept_bytecode() -> Iterator[None]:
    """Keeps the bytecode of modules that are imported meanwhile in the user's cache, if torch's is not kept beside its
    sources. This project's is kept there from now on, if it is not beside them. A PYTHONPYCACHEPREFIX stays in force.
    """
    with _setting:
        before = sys.dont_write_bytecode
        ours = None
        if sys.pycache_prefix is None:
            is_kept = _is_kept_beside("torch")
            if not (is_kept and _is_written_beside(__file__)):
                _keep_ours()
            if not is_kept:
                with contextlib.suppress(ConfigError, OSError):
                    ours = _folder()
                    sys.pycache_prefix, sys.dont_write_bytecode = ours, False
        elif _is_own(sys.pycache_prefix):  # as the process has it that has started this one
            _keep_ours()
    try:
        yield
    finally:
        with _setting:
            if ours is not None and sys.pycache_prefix == ours:
                sys.pycache_prefix, sys.dont_write_bytecode = None, before


class _KeptLoader(HashedLoader):
    """Loads a module of this project: with bytecode that is beside it and no older, or else in the user's cache."""

    def folder(self) -> str | None:
        if sys.pycache_prefix is None and _is_up_to_date(self.path):
            return None
        folder = _folder_or_none()
        return folder if sys.pycache_prefix in (None, folder) else None


@cache
def _keep_ours() -> None:
    """Has this project's modules loaded so from now on."""
    load_ours(_KeptLoader)


@cache
def _folder_or_none() -> str | None:
    if sys.pycache_prefix is not None and _is_own(sys.pycache_prefix):
        return sys.pycache_prefix
    with contextlib.suppress(ConfigError, OSError):
        return _folder()
    return None


def environment() -> dict[str, str]:
    """Variables that make a new Python process keep its bytecode where this one does, if not beside its sources."""
    if sys.pycache_prefix is None:
        return {}
    return {"PYTHONPYCACHEPREFIX": sys.pycache_prefix} | ({} if sys.dont_write_bytecode else {_NO_BYTECODE: ""})


def preamble() -> str:
    """The statement that a new Python process begins with which gets `environment()` and is no `kept_bytecode`: then
    this project's modules go by their hash there too."""
    if sys.pycache_prefix is None or not _is_own(sys.pycache_prefix):
        return ""
    return "from mllm_compile.process import hashed_bytecode; hashed_bytecode.load_ours(); "


@contextmanager
def compiled_ahead(packages: Sequence[str]) -> Iterator[None]:
    """Has other processes compile `packages` (OF_TORCH, OF_A_COMPILE) ahead of imports in this one, unless their
    bytecode is there or is not to be kept."""
    process = None
    with contextlib.suppress(OSError):  # no room for a process: each import compiles
        process = _start_compiling(packages)
    try:
        yield
    finally:
        if process is not None:
            process.kill_group()
            process.wait()


def _start_compiling(packages: Sequence[str]) -> ProcessGroup | None:
    workers = min(_MOST_WORKERS, (os.cpu_count() or 1) - 2)  # this process imports, and the compiler process does
    if sys.pycache_prefix is None or sys.dont_write_bytecode or not sys.executable or workers < 2:
        return None
    folders = [folder for folder in map(_package_folder, packages) if folder is not None]
    if all(_is_compiled(os.path.join(folder, "__init__.py")) for folder in folders):
        return None
    left_out = f"^({'|'.join(map(re.escape, folders))})/(.*/)?({_NOT_AHEAD})/"
    return ProcessGroup(
        [sys.executable, "-P", "-m", "compileall", "-qq", "-j", str(workers), "-x", left_out, *folders],
        env=os.environ | environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


# In the order in which they are needed: with torch itself, and by a model's compile.
OF_TORCH = (
    "torch/nn",
    "torch/fx",
    "torch/utils",
    "torch/distributed",
    "torch/ao",
    "torch/_higher_order_ops",
    "torch/_subclasses",
    "torch/_refs",
    "torch/_decomp",
    "numpy/_core",
    "numpy/lib",
)
OF_A_COMPILE = (
    "sympy",
    "huggingface_hub",
    "jinja2",
    "torch/_dynamo",
    "mpmath",
    "transformers",
    "torch/_functorch",
    "torch/_inductor",
    "networkx",
)
_NOT_AHEAD = "tests|testing|onnx|models"
_MOST_WORKERS = 8
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"  # counts where it is not empty
_VERSIONED = ("torch", "transformers", "mllm_compile")


def _is_kept_beside(package: str) -> bool:
    """True if its bytecode is there, or will be when it is imported."""
    source = _source(package)
    return source is None or _is_compiled(source) or _is_written_beside(source)


def _is_written_beside(source: str) -> bool:
    return not sys.dont_write_bytecode and os.access(os.path.dirname(source), os.W_OK)


def _source(package: str) -> str | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ValueError, ModuleNotFoundError):  # it was put into sys.modules by hand; what it is in is not there
        return None
    return spec.origin if spec is not None and spec.has_location else None


def _package_folder(path: str) -> str | None:
    """The folder of a package, or of one inside it, without importing it."""
    package, _, inside = path.partition("/")
    source = _source(package)
    folder = os.path.join(os.path.dirname(source), inside).rstrip("/") if source is not None else ""
    return folder if os.path.isdir(folder) else None


def _is_compiled(source: str) -> bool:
    return os.path.exists(importlib.util.cache_from_source(source))


def _is_up_to_date(source: str) -> bool:
    try:
        return os.stat(importlib.util.cache_from_source(source)).st_mtime >= os.stat(source).st_mtime
    except OSError:
        return False


def _is_own(prefix: str) -> bool:
    """True of a folder that `_folder` names, of whatever versions."""
    with contextlib.suppress(ConfigError):  # a user without a home
        return os.path.dirname(prefix) == str(bytecode_cache(auto_cache_dir()[0]))
    return False


def _folder() -> str:
    """The folder for one installation and its versions: files of another may have the same time, size and place."""
    bytecode = bytecode_cache(auto_cache_dir()[0])
    make_private(bytecode)
    of_what = sys.prefix, *map(_version, _VERSIONED)
    return str(bytecode / hashlib.sha256("\n".join(of_what).encode()).hexdigest()[:16])


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
