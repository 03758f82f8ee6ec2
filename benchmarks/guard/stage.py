"""A stage: work of the product that is timed by itself, and the tree that it is taken from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Round:
    """One stage that is ready to be timed.

    Attributes:
        run: the work, which takes what `setup` returned.
        setup: what each round needs and no time counts.
        clock: seconds of the work. CPU time by default: other work of the machine hardly changes it.
    """

    run: Callable[..., object]
    setup: Callable[[], tuple[Any, ...]] = tuple
    clock: Callable[[], float] = time.process_time

    def seconds(self) -> float:
        """The time of one round. The product's own timing may be missing: the tree may be of another commit."""
        arguments = self.setup()
        begin = self.clock()
        self.run(*arguments)
        return self.clock() - begin


class Tree:
    """The tree of one process: a folder for what its stages make, and what ends with the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ending = ExitStack()
        self._made: dict[Any, Any] = {}

    def once(self, make: Callable[[Tree], Any]) -> Any:
        """The result of `make`, made once for all stages."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    def python(self, code: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        """A process of the same tree."""
        process = subprocess.Popen([sys.executable, "-P", "-c", code, *arguments], **options)
        self.ending.callback(_ended, process)
        return process

    def config(self, name: str, config: Mapping[str, Any]) -> Path:
        """A config's file; its runtimes are in the tree's folder."""
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps({**config, "cache": {"dir": str(self.folder / "cache")}}), encoding="utf-8")
        return path


def _ended(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


def cpu_clock(pid: int) -> Callable[[], float]:
    """The CPU time of another process, all its threads together."""
    clock = (~pid << 3) | 2  # as clock_getcpuclockid makes it
    return lambda: time.clock_gettime(clock)


@dataclass(frozen=True)
class Stage:
    """A stage by its name.

    Attributes:
        ready: makes its Round in a tree.
        rounds: how many of them are timed.
        threshold: more than so many times the base's median is too slow.
    """

    name: str
    ready: Callable[[Tree], Round]
    rounds: int
    threshold: float = 1.4


def environment_of(tree: Path, cache: Path) -> dict[str, str]:
    """The environment of a process that takes the product from a tree, and libraries from where this one has them."""
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(tree), *([before] if before else [])])
    return os.environ | {"OMP_NUM_THREADS": "1", "MLLM_COMPILE_CACHE": str(cache), "PYTHONPATH": path}
