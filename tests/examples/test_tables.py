"""The pages of examples and benchmarks list every script of their folders, by its own words."""

from __future__ import annotations

import pytest

from tests.examples.tables import PAGES, ROOT, TABLE, with_tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_has_its_folders_scripts(page):
    text = page.read_text(encoding="utf-8")
    assert TABLE.search(text)
    assert with_tables(page) == text, f"{page} is old: python -m tests.examples.tables"


def test_every_folder_of_scripts_that_measure_has_a_table():
    page = (ROOT / "docs" / "lab" / "scripts.md").read_text(encoding="utf-8")
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").rglob("*_speed.py")}
    assert folders <= {found[2] for found in TABLE.finditer(page)}
