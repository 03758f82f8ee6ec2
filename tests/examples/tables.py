"""Writes the tables of scripts in the pages of examples/ and in docs/lab/scripts.md from the docstring of each script.

The scripts of a page's own folder are a table between `<!-- scripts -->` and `<!-- end -->`, scripts of another folder
a list between `<!-- scripts FOLDER -->` and the same. A test compares the pages with what this module makes.

    python -m tests.examples.tables
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "examples" / "README.md",
    ROOT / "examples" / "tiny_models" / "README.md",
    ROOT / "docs" / "lab" / "scripts.md",
)
TABLE = re.compile(r"(<!-- scripts ?([\w/]*) -->\n).*?(<!-- end -->)", re.DOTALL)
_NEEDS = re.compile(r"Needs (.*?)(?:[.;:(]| to )", re.DOTALL)


def with_tables(page: Path) -> str:
    """Returns the page's text with its tables of scripts made anew."""
    text = page.read_text(encoding="utf-8")
    return TABLE.sub(lambda found: found[1] + _table(page.parent, found[2]) + found[3], text)


def _table(parent: Path, folder: str) -> str:
    """A row or item for each script of the folder, and behind them a list of the modules that scripts share."""
    files = [path for path in sorted((ROOT / folder if folder else parent).glob("*.py")) if path.name != "__init__.py"]
    if folder:
        links = ((file, os.path.relpath(file, parent)) for file in files)
        return "".join(f"- [{file.stem}]({link}): {_told(file)[0]}\n" for file, link in links)
    shared = [file for file in files if "__main__" not in file.read_text(encoding="utf-8")]
    table = "| script | what it is about | needs |\n|---|---|---|\n"
    table += "".join(_row(file) for file in files if file not in shared)
    if shared:
        table += "\nThey share:\n\n" + "".join(f"- [{file.name}]({file.name}): {_told(file)[0]}\n" for file in shared)
    return table


def _row(script: Path) -> str:
    about, needs = _told(script)
    return f"| [{script.name}]({script.name}) | {about} | {needs} |\n"


def _told(file: Path) -> tuple[str, str]:
    """The first sentences of a file's docstring, and what it says that it needs."""
    told = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    needs = _NEEDS.search(told)
    return " ".join(told.partition("\n\n")[0].split()), " ".join(needs[1].split()) if needs else ""


def main() -> None:
    for page in PAGES:
        page.write_text(with_tables(page), encoding="utf-8")


if __name__ == "__main__":
    main()
