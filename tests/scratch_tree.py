"""A copy of the product in which a test adds something, as docs/adding.md says how."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.hang_guard import HANG_S

ROOT = Path(__file__).parents[1]


Change = tuple[str, str]  # a text that a file has once, and what takes its place


def copy_with(folder: Path, new: Mapping[str, str], changed: Mapping[str, Change | Sequence[Change]]) -> None:
    """Copies the product into `folder`, beside these tests, with files that are new and texts of others replaced."""
    for name in ("mllm_compile", "runtime", "passes"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    (folder / "tests").symlink_to(ROOT / "tests")
    for name, text in new.items():
        (folder / name).write_text(text)
    for name, changes in changed.items():
        text = (folder / name).read_text()
        for before, after in [changes] if isinstance(changes, tuple) else changes:
            assert text.count(before) == 1, f"{name}: {before}"
            text = text.replace(before, after)
        (folder / name).write_text(text)


def run_in(folder: Path, code: str) -> None:
    """Runs Python code with that copy; it must end well."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
