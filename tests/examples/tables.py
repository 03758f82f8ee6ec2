"""Writes the tables of the examples' pages from what each script says of itself.

A table stands between `<!-- scripts -->` and `<!-- end -->`. A test compares the pages with what this module makes.

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
    rows = "".join(_row(script) for script in sorted(page.parent.glob("*.py")))
    table = f"| script | what it is about | needs |\n|---|---|---|\n{rows}"
    return re.sub(r"(<!-- scripts -->\n).*?(<!-- end -->)", lambda found: found[1] + table + found[2], text, flags=re.S)


def _row(script: Path) -> str:
    told = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    first = " ".join(told.partition("\n\n")[0].split())
    needs = _NEEDS.search(told)
    return f"| [{script.name}]({script.name}) | {first} | {' '.join(needs[1].split()) if needs else ''} |\n"


def main() -> None:
    for page in PAGES:
        page.write_text(with_table(page), encoding="utf-8")


if __name__ == "__main__":
    main()
