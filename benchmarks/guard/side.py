"""The process that runs one tree's stages: `python -P benchmarks/guard/side.py KIND FOLDER`.

The product is PYTHONPATH's; the stages are always the ones beside this file. A line `ready NAME` on stdin makes a stage
ready, `time NAME` times one round of it. The answer is a line of JSON on stdout: {"seconds": …}, or {"failed": why}.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.guard.stage import Round, Stage, Tree

OWN = Path(__file__).parents[1]


def find_own_stages() -> None:
    """Makes `benchmarks` the package of this file, also where the tree has one of its own."""
    place = OWN / "__init__.py"
    spec = importlib.util.spec_from_file_location("benchmarks", place, submodule_search_locations=[str(OWN)])
    assert spec is not None and spec.loader is not None
    sys.modules["benchmarks"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


class Stages:
    """The stages of this process's tree."""

    def __init__(self, stages: dict[str, Stage], tree: Tree) -> None:
        self._stages, self._tree = stages, tree
        self._rounds: dict[str, Round] = {}

    def answer(self, what: str, name: str) -> dict[str, Any]:
        """The answer to a line."""
        try:
            if what == "ready":
                self._rounds[name] = self._stages[name].ready(self._tree)
                seconds = self._rounds[name].seconds()  # work that is done once is no part of a round
                gc.freeze()
            else:
                gc.collect()
                seconds = self._rounds[name].seconds()
            return {"seconds": seconds}
        except Exception:
            return {"failed": traceback.format_exc()}


def main(kind: str, folder: str) -> None:
    find_own_stages()
    from benchmarks.guard.registry import STAGES
    from benchmarks.guard.stage import Tree

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the product prints goes to the terminal
    tree = Tree(Path(folder))
    with tree.ending:
        stages = Stages({stage.name: stage for stage in STAGES[kind]}, tree)
        for line in sys.stdin:
            what, _, name = line.strip().partition(" ")
            print(json.dumps(stages.answer(what, name)), file=answers, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
