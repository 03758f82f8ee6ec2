"""The C++ compiler of packages, and its options."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from mllm_compile.errors import CompileError
from mllm_compile.process.cpp_compiler import SYSTEM_CXX, compiler_command

# The wrapper around the kernels is compiled without optimisation. It only calls them, and is most of a package's
# compile time (CPU, one decoder layer: 31 s → 11 s, same time a call).
WRAPPER_OPTIONS = {"aot_inductor.compile_wrapper_opt_level": "O0"}


def check_compiler() -> None:
    """
    Raises:
        CompileError: there is no C++ compiler, which every package needs.
    """
    if compiler_command() is None:
        asked = os.environ.get("CXX") or "g++"
        raise CompileError(
            f"there is no C++ compiler here: neither {SYSTEM_CXX} nor {asked}. Install g++ (Debian and Ubuntu: apt-get "
            "install g++), or name another one in CXX. A runtime needs none once it is compiled, so it may come from a "
            "machine that has one (mllm-compile MODEL --output FOLDER); compile.backend: eager needs none, and is slow."
        )


@contextmanager
def system_compiler() -> Iterator[None]:
    """Inductor's host code is built with the system's g++. A wrapped CXX may link libstdc++ into the package, which
    then crashes in the loader (seen in one image)."""
    before = {name: os.environ.get(name) for name in ("CXX", "CC")}
    for name, path in (("CXX", SYSTEM_CXX), ("CC", "/usr/bin/gcc")):
        if os.path.exists(path):
            os.environ[name] = path
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
