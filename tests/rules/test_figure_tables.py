"""Tables of figures in the pages on performance name commits that can be checked out."""

from __future__ import annotations

import pytest

from tests.rules.figure_tables import COMMIT, PAGES, ROOT, age_of, has_history, main, tables_of

TABLES = [table for page in PAGES for table in tables_of(page)]
ROWS = "| a | b |\n|---|---|\n| x | 1.5 |\n| y | 2,300 |\n| z | **7** |\n"


def commits(text: str) -> list[tuple[str, ...]]:
    return [table.commits for table in tables_of(PAGES[0], text)]


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_a_table_of_figures_names_its_commit(table):
    assert table.commits, f"{table} names no commit beside it: say which one its figures are of"
    if has_history():
        assert any(age_of(commit) for commit in table.commits), f"{table}: there is no commit {table.commits}"


@pytest.mark.skipif(not has_history(), reason="this is no checkout with its history")
def test_the_history_has_every_commit_that_a_page_cites():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    cited = {commit: page.name for page in pages for commit in COMMIT.findall(page.read_text(encoding="utf-8"))}
    cited = {commit: page for commit, page in cited.items() if not commit.isdigit()}  # which a figure may be
    assert len(cited) > 50
    assert not {commit: page for commit, page in cited.items() if age_of(commit) is None}


def test_the_pages_have_tables():
    assert len(TABLES) > 40


def test_a_commit_counts_for_the_tables_beside_it_alone():
    assert commits(f"## A\n\nBy abcdef1:\n\n{ROWS}\nthen\n\n{ROWS}\n") == [("abcdef1",), ()]
    assert commits(f"## A\n\nBy abcdef1.\n\n## B\n\n{ROWS}") == [()]
    assert commits(f"## A\n\n{ROWS}\nMeasured: 6067252, 2026-11-26.\n") == [("6067252",)]
    assert commits(f"## A\n\n{ROWS.replace('z', 'z (12ab34cd)')}") == [("12ab34cd",)]


def test_a_table_without_figures_needs_none():
    assert commits("## A\n\n| name | what |\n|---|---|\n| a | b |\n| c | 1 |\n") == []


@pytest.mark.skipif(not has_history(), reason="this is no checkout with its history")
def test_the_age_of_each_table_is_printed(capsys):
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(TABLES)
    assert all(" commits " in line and " days " in line for line in lines)
    assert age_of("0123456789ab") is None
