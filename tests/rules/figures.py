"""Counts the product's and the tests' files, functions, classes, docstrings and folders, as one Markdown table.

    python -m tests.rules.figures [ROOT]        ROOT: another checkout; by default this one

Lines are all lines of a file; a function's include its docstring and end with its body. Parameters are all but self,
cls and those with stars. Docstrings and comments are shares of the lines that are not blank; comments have lines of
their own.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("mllm_compile", "passes", "runtime")
SETS = {**{f"{folder}/": (folder,) for folder in PRODUCT}, "**product**": PRODUCT, "tests/": ("tests",)}
_HEAD = (
    *("set", "py files", "lines", "file med / mean / p90 / max", "functions", "fn med / mean / p90 / max"),
    *("> 6 params", "classes", "docstr. %", "comment %", "folders, largest", "< 40 lines"),
)
_MANY_PARAMETERS = 6
_FEW_LINES = 40
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (*_FUNCTIONS, ast.ClassDef, ast.Module)


@dataclass(frozen=True)
class FileFigures:
    """The figures of one file.

    Attributes:
        path: the file.
        lines, blank, comments, docstrings: numbers of lines.
        functions: the lines of each.
        parameters: the parameters of each.
        classes: how many there are.
    """

    path: Path
    lines: int
    blank: int
    comments: int
    docstrings: int
    functions: tuple[int, ...]
    parameters: tuple[int, ...]
    classes: int


def read_file(path: Path) -> FileFigures:
    text = path.read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines()]
    nodes = list(ast.walk(ast.parse(text)))
    functions = [node for node in nodes if isinstance(node, _FUNCTIONS)]
    return FileFigures(
        path,
        len(lines),
        lines.count(""),
        sum(line.startswith("#") for line in lines),
        sum(_span(node.body[0]) for node in nodes if isinstance(node, _DOCUMENTED) and ast.get_docstring(node)),
        tuple(map(_span, functions)),
        tuple(sum(1 for _ in _parameters(function)) for function in functions),
        sum(isinstance(node, ast.ClassDef) for node in nodes),
    )


def _span(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    names = function.args
    for number, one in enumerate([*names.posonlyargs, *names.args]):
        if number or one.arg not in ("self", "cls"):
            yield one.arg
    yield from (one.arg for one in names.kwonlyargs)


def files_of(root: Path, folders: Iterable[str]) -> list[FileFigures]:
    """Of all modules below the folders; links to folders are not followed."""
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    return [read_file(path) for path in paths if not any(parent.is_symlink() for parent in path.parents)]


def row_of(name: str, files: Sequence[FileFigures]) -> list[str]:
    """The cells of a set's line."""
    full = sum(one.lines - one.blank for one in files)
    functions = [length for one in files for length in one.functions]
    folders = Counter(one.path.parent for one in files if one.path.name != "__init__.py")
    num_folders = len({one.path.parent for one in files})
    return [
        name,
        f"{len(files):,}",
        f"{sum(one.lines for one in files):,}",
        _spread([one.lines for one in files], "{:.0f}"),
        f"{len(functions):,}",
        _spread(functions, "{:.1f}"),
        str(sum(number > _MANY_PARAMETERS for one in files for number in one.parameters)),
        str(sum(one.classes for one in files)),
        f"{sum(one.docstrings for one in files) / full:.1%}".rstrip("%"),
        f"{sum(one.comments for one in files) / full:.1%}".rstrip("%"),
        f"{num_folders}, {max(folders.values())}",
        str(sum(one.lines < _FEW_LINES for one in files)),
    ]


def _spread(values: list[int], mean: str) -> str:
    ordered = sorted(values)
    median, p90 = (ordered[int(share * len(ordered))] for share in (0.5, 0.9))
    return f"{median} / {mean.format(sum(ordered) / len(ordered))} / {p90} / {ordered[-1]}"


def table(root: Path) -> str:
    """Markdown, and a line on CUDA."""
    rows = [_HEAD, ("---", *["---:"] * (len(_HEAD) - 1))]
    rows += [row_of(name, files_of(root, folders)) for name, folders in SETS.items()]
    cuda = [path for suffix in ("cu", "cuh") for path in (root / "runtime").rglob(f"*.{suffix}")]
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in cuda)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + f"\nCUDA: {len(cuda)} files, {num_lines:,} lines.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="another checkout")
    print(table(parser.parse_args().root), end="")


if __name__ == "__main__":
    main()
