"""Finds the tables of figures in the pages on performance, and the commits that they are of.

A table is of the commits in its lines, and in the prose around it up to the next table or heading. `python -m
tests.rules.figure_tables` prints the age of each, the oldest first.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# tried.md says of itself that most of its lines are of code that was not kept; models.md is made of a record that tests
# compare with the code of today.
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "performance.md",
    *(path for path in sorted((ROOT / "docs" / "lab").glob("*.md")) if path.name not in ("tried.md", "models.md")),
]
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,12}\b")
_FIGURE = re.compile(r"\|\s*\**\d[\d, ]*(\.\d+)?\b")
_FEWEST_FIGURES = 3  # of a table of figures


@dataclass(frozen=True)
class FigureTable:
    """A table of figures: its page, the number of its first line, its heading, and the commits named for it."""

    page: Path
    line: int
    heading: str
    commits: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line} ({self.heading})"


def tables_of(page: Path, text: str | None = None) -> Iterator[FigureTable]:
    """The tables of figures of a page, in order."""
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("#")] + [len(lines)]
    for start, end in zip([0, *starts], starts, strict=False):
        section = lines[start:end]
        heading = section[0].strip("# ") if section else ""
        tables = _tables(section)
        bounds = [0, *(place for table in tables for place in table), len(section)]
        for number, (first, behind) in enumerate(tables):
            if len(_FIGURE.findall("\n".join(section[first:behind]))) >= _FEWEST_FIGURES:
                around = "\n".join(section[bounds[2 * number] : bounds[2 * number + 3]])
                yield FigureTable(page, start + first + 1, heading, tuple(dict.fromkeys(COMMIT.findall(around))))


def _tables(section: list[str]) -> list[tuple[int, int]]:
    """The first line of each table, and the one behind its last."""
    is_row = [line.startswith("|") for line in section]
    firsts = [i for i, row in enumerate(is_row) if row and not (i and is_row[i - 1])]
    return [(first, next((i for i in range(first, len(section)) if not is_row[i]), len(section))) for first in firsts]


@cache
def age_of(commit: str) -> tuple[int, int] | None:
    """(commits, days) since a commit; None: the history that leads to HEAD lacks it.

    A clone of a folder on the same disk has objects of removed branches as well; another clone has not.
    """
    try:
        _git("merge-base", "--is-ancestor", commit, "HEAD")
        date = _git("show", "-s", "--format=%ct", f"{commit}^{{commit}}")
        count = _git("rev-list", "--count", f"{commit}..HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(count), (datetime.now(UTC) - datetime.fromtimestamp(int(date), UTC)).days


def has_history() -> bool:
    """True where the sources are a checkout with all of its history."""
    try:
        return _git("rev-parse", "--is-shallow-repository") == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    rows = []
    for table in (table for page in PAGES for table in tables_of(page)):
        ages = [age for age in map(age_of, table.commits) if age is not None]
        rows.append((max(ages, default=(0, 0)), str(table), ", ".join(table.commits) or "no commit"))
    for (commits, days), table, names in sorted(rows, reverse=True):
        print(f"{commits:6,} commits {days:4} days  {table}: {names}")


if __name__ == "__main__":
    main()
