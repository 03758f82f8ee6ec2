"""Python's bytecode of torch, Transformers and the rest, kept where the installation does not keep it.

Installers may leave compiling to the first import (uv does; pip with --no-compile), and in a container that import
often cannot write: PYTHONDONTWRITEBYTECODE is set, or the packages belong to another user. Then every process compiles
every module again: on such a machine 2.4 s of the 6.2 in which an engine started from its runtime.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"  # counts where it is not empty


def _is_kept_beside(package: str) -> bool:
    """Whether its bytecode is there, or will be when it is imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # it was put into sys.modules by hand
        return True
    if spec is None or spec.cached is None or spec.origin is None or os.path.exists(spec.cached):
        return True
    return not sys.dont_write_bytecode and os.access(os.path.dirname(spec.origin), os.W_OK)


def _folder() -> str:
    """Below what compilers keep: `mllm-compile cache prune` removes it with that."""
    compilers = compiler_cache(os.path.abspath(auto_cache_dir()[0]))
    make_private(compilers)
    return str(compilers / "bytecode")
