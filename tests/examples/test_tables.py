"""The pages of the examples list every script of their folder, by its own words."""

from __future__ import annotations

import pytest

from tests.examples.tables import PAGES, with_table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_has_its_folders_scripts(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- scripts -->" in text
    assert with_table(page) == text, f"{page} is old: python -m tests.examples.tables"
