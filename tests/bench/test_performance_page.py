import re

from tests.bench.performance_page import PAGE, TABLES, with_tables


def test_the_tables_of_the_page_are_those_of_the_kept_results():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "docs/performance.md is old: python -m tests.bench.performance_page"


def test_the_page_has_every_table():
    assert sorted(re.findall(r"<!-- table: (\w+) -->", PAGE.read_text(encoding="utf-8"))) == sorted(TABLES)
