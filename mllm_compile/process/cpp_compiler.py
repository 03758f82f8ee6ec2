"""Finds the C++ compiler."""

from __future__ import annotations

import os
import shlex
import shutil

SYSTEM_CXX = "/usr/bin/g++"


def compiler_command() -> tuple[str, ...] | None:
    """The C++ compiler, with options where CXX has some, or None."""
    if os.path.exists(SYSTEM_CXX):
        return (SYSTEM_CXX,)
    asked = tuple(shlex.split(os.environ.get("CXX") or "g++"))
    return asked if asked and shutil.which(asked[0]) is not None else None
