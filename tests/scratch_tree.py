"""A copy of the product where a test adds something, as docs/adding.md describes."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from tests.fresh_process import FreshProcess, fresh_process

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


# None of the product's own modules, which the copy brings.
LIBRARIES = "import torch._dynamo, transformers.models.qwen3.modeling_qwen3"
IN_THE_COPY = """
import os, sys
os.environ["PYTHONPATH"] = FOLDER
os.chdir(FOLDER)
sys.path.insert(0, FOLDER)
"""


@cache
def _process() -> FreshProcess:
    """One for all copies that a process of tests makes; it ends with that."""
    ends = ExitStack()
    atexit.register(ends.close)
    return ends.enter_context(fresh_process(LIBRARIES))


def run_in(folder: Path, code: str) -> None:
    """Runs Python code with that copy, in a fork of a process that has imported the libraries; it must end well."""
    _process().run(IN_THE_COPY.replace("FOLDER", repr(str(folder))) + code)
