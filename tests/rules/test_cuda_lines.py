"""A line of C++ and CUDA has at most 120 columns, as a line of Python; .clang-format breaks a longer one."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_COLUMNS = 120
SUFFIXES = {".cu", ".cuh", ".cpp"}
SOURCES = sorted(
    path for folder in ("runtime", "tests") for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES
)


def test_no_line_of_cuda_is_too_long():
    assert len(SOURCES) > 30
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MOST_COLUMNS
    ]
    assert not long, f"lines of more than {MOST_COLUMNS} columns: {long}"
