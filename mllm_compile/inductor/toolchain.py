"""The C++ compiler of packages, and its options."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

SYSTEM_CXX = "/usr/bin/g++"
# The wrapper around the kernels is compiled without optimisation: it only calls them, and its compile time is most of a
# package's (CPU, one decoder layer: 31 s → 11 s, same time a call).
WRAPPER_OPTIONS = {"aot_inductor.compile_wrapper_opt_level": "O0"}


@contextmanager
def system_compiler() -> Iterator[None]:
    """Inductor's host code is built with the system's g++: a wrapped CXX may link libstdc++ into the package, which
    then crashes in the loader (seen with an image whose CXX does so)."""
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
