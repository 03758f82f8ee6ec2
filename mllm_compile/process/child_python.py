"""How a further Python process is started that runs a module of this project, and finds what this process finds.

Python's own modules are found first. Otherwise a user's `queue.py` beside a script or in the current folder, which may
have come with a model, would run in place of Python's. The current folder is looked into only where this process does
so, as Python's prompt and `python -m` do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as a program; it takes `environment()`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_of(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The module and the arguments of a command that `command` has made."""
    _, _, _, module, *arguments = command
    return module, arguments


def environment() -> dict[str, str]:
    """This process's: the other finds its modules with it, wherever they come from."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(module_folders())}


def module_folders() -> list[str]:
    """Where this process finds its modules, Python's own first."""
    standard = os.path.dirname(os.__file__)
    folders = [os.path.abspath(folder) for folder in sys.path]
    return sorted(folders, key=lambda folder: folder not in (standard, os.path.join(standard, "lib-dynload")))
