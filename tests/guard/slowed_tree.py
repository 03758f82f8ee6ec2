"""A copy of this tree with a slower product, by work that is put into a function."""

from __future__ import annotations

import ast
import os
import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Slowed(NamedTuple):
    """A function of the product, and the seconds of CPU time that each call of it takes more."""

    file: str
    function: str
    seconds: float


# As much as a round of the stage takes on a slow machine, so that it takes at least twice as long anywhere.
SLOWED = {
    "trace": Slowed("mllm_compile/model/trace.py", "trace_model", 2.0),
    "passes": Slowed("passes/pipeline.py", "run_passes", 0.4),
    "scheduler step": Slowed("runtime/schedule/scheduler.py", "schedule", 0.0001),
    "sampler": Slowed("runtime/sampling/sampler.py", "__call__", 0.05),
    "detokenizer": Slowed("mllm_compile/text/detokenizer.py", "push", 0.00001),
    "server front": Slowed("mllm_compile/server/generate.py", "endpoint", 0.003),
    "warm start": Slowed("mllm_compile/engine/start/assemble.py", "_load", 1.5),
    "decode step": Slowed("runtime/step/runner.py", "submit", 0.02),
    "launches": Slowed("runtime/ops/stream_linear/streamed_ops.py", "_launch", 0.0001),
}
WORK = "import time as _t; _e = _t.thread_time() + {seconds}\n{indent}while _t.thread_time() < _e: pass\n{indent}"


def slowed_tree(folder: Path, *stages: str) -> Path:
    """A tree in `folder` with these stages slower."""
    for name in ("mllm_compile", "passes", "runtime"):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, copy_function=_link, ignore=skipped)
    for name in stages:
        slow = SLOWED[name]
        path = folder / slow.file
        source = with_work(path.read_text(encoding="utf-8"), slow)
        path.unlink()  # a link to the tree's own
        path.write_text(source, encoding="utf-8")
    return folder


def _link(source: str, target: str) -> None:
    """Links a file, or copies it where the folders are on different disks."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def with_work(source: str, slow: Slowed) -> str:
    """The source with work ahead of the first statement of the first function of this name."""
    function, *_ = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == slow.function
    )
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    lines = source.splitlines(keepends=True)
    at, indent = body[0].lineno - 1, " " * body[0].col_offset
    lines[at] = indent + WORK.format(seconds=slow.seconds, indent=indent) + lines[at].lstrip()
    return "".join(lines)
