"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str) -> Path:
    """The path with a home folder in place of `~` or `~name`; one that is_homeless stays as it is, and is not there."""
    return Path(os.path.expanduser(text))  # Path.expanduser raises a RuntimeError in place of that


def is_homeless(text: str) -> bool:
    """True if a path begins with `~`, and there is no such user, or none with a home."""
    return os.path.expanduser(text).startswith("~")
