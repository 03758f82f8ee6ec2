"""Writes the tables of the examples' pages from what each script says of itself.

A table stands between `<!-- scripts -->` and `<!-- end -->`, with a list of the modules that scripts share behind it. A
test compares the pages with what this module makes.

    python -m tests.examples.tables
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGES = tuple(EXAMPLES / folder / "README.md" for folder in ("", "measure", "tiny_models"))
_NEEDS = re.compile(r"Needs (.*?)(?:[.;:(]| to )", re.DOTALL)


def with_table(page: Path) -> str:
    """Returns the page's text with the table of its folder's scripts made anew."""
    text = page.read_text(encoding="utf-8")
    files = sorted(page.parent.glob("*.py"))
    shared = [file for file in files if "__main__" not in file.read_text(encoding="utf-8")]
    table = "| script | what it is about | needs |\n|---|---|---|\n"
    table += "".join(_row(file) for file in files if file not in shared)
    if shared:
        table += "\nThey share:\n\n" + "".join(f"- [{file.name}]({file.name}): {_told(file)[0]}\n" for file in shared)
    return re.sub(r"(<!-- scripts -->\n).*?(<!-- end -->)", lambda found: found[1] + table + found[2], text, flags=re.S)


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
        page.write_text(with_table(page), encoding="utf-8")


if __name__ == "__main__":
    main()
