import re

import pytest

from tests.bench.performance_page import PAGES, TABLES, with_tables


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_kept_results(path):
    page = path.read_text(encoding="utf-8")
    assert with_tables(page) == page, f"{path.name} is old: python -m tests.bench.performance_page"


def test_the_pages_have_every_table():
    named = [name for page in PAGES for name in re.findall(r"<!-- table: (\w+) -->", page.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(TABLES)
