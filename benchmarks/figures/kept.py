"""The results in docs/lab/results, as the pages' tables show them: one or more files a GPU, shape and engine.

`GPU-SHAPE-ENGINE.json` is the whole of one commit. What a later commit added is in `GPU-SHAPE-ENGINE-PART.json`.
It is shown where the whole lacks it, with its own commit. A result without a commit is refused.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Self

from benchmarks.figures.shapes import RESULTS, ROOT, Shape
from mllm_compile.bench.measure.results import BenchResult, EngineRun, Measurement
from mllm_compile.bench.show.report import work_name
from mllm_compile.errors import ConfigError

MOST_SHOWN_SPREAD = 0.30  # of samples; of a figure that varies more the tables have none


def read_result(path: Path) -> BenchResult:
    """
    Raises:
        ConfigError: no result, or one of a tree that nobody can get again.
    """
    result = BenchResult.read(path)
    commit = result.environment.get("commit", "unknown")
    if commit == "unknown" or commit.endswith("+changes"):
        raise ConfigError(
            f"{path} is of the commit {commit!r}; expected one that can be checked out. "
            "Commit first and measure again, with --commit where the sources are a copy."
        )
    return result


@dataclass(frozen=True)
class KeptFigures:
    """The results of one engine and shape on one kind of GPU: the whole one, then those of parts."""

    whole: BenchResult
    parts: tuple[BenchResult, ...] = ()

    @classmethod
    def of(cls, shape: Shape, engine: str, gpu: str) -> Self | None:
        """
        Raises:
            ConfigError: as `read_result`.
        """
        name = f"{gpu}-{shape.model}-{engine}"
        path = RESULTS / f"{name}.json"
        parts = (read_result(part) for part in sorted(RESULTS.glob(f"{name}-*.json")))
        return cls(read_result(path), tuple(parts)) if path.exists() else None

    @property
    def run(self) -> EngineRun:
        """The engine's run of the whole result."""
        return self.whole.runs[0]

    @cached_property
    def lines(self) -> dict[str, Measurement]:
        """The shown measurements by name; of what varies more the median says too little."""
        lines: dict[str, Measurement] = {}
        for result in (self.whole, *self.parts):
            lines = _shown(result) | lines
        return lines

    def source(self, names: Collection[str]) -> str:
        """The commits by which the measurements of these names were taken, and their dates; of another engine also its
        version."""
        by = "" if self.run.engine == "mllm" else f"{self.run.engine} {self.run.version} by "
        source = by + _taken(self.whole)
        known = set(_shown(self.whole))
        for part in self.parts:
            added = [name for name in _shown(part) if name in names and name not in known]
            known.update(added)
            source += f" ({', '.join(added)}: {_taken(part)})" if added else ""
        return source


def ages() -> Iterator[str]:
    """The age of each result: its commit, days, and how many commits were made since."""
    for path in sorted(RESULTS.glob("*.json")):
        environment = read_result(path).environment
        taken = datetime.strptime(environment["date"][:10], "%Y-%m-%d").replace(tzinfo=UTC)
        days = (datetime.now(UTC) - taken).days
        since = _commits_since(environment["commit"])
        yield f"{path.name}: {environment['commit']}, {days} days and {since} commits ago"


def _shown(result: BenchResult) -> dict[str, Measurement]:
    return {work_name(line): line for line in result.runs[0].measurements if line.spread <= MOST_SHOWN_SPREAD}


def _taken(result: BenchResult) -> str:
    return f"{result.environment['commit'][:8]}, {result.environment['date'][:10]}"


def _commits_since(commit: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-list", "--count", f"{commit}..HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else "an unknown number of"
