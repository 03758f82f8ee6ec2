"""The documentation can be read: all pages together are short, and so are the sentences of each."""

from __future__ import annotations

import pytest

from tests.rules.reading import count_words, main, pages, sentences_of

MOST_WORDS = 30_000
LONGEST_MEAN = 20.0
PAGES = pages()


def test_all_pages_together_are_short():
    words = sum(page.words for page in PAGES)
    assert words <= MOST_WORDS, f"{words} words; move measurements to docs/lab, or leave out what a link can say"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_sentences_of_a_page_are_short(page):
    longest = [sentence for sentence in sentences_of(page.path.read_text("utf-8")) if len(sentence.split()) > 35]
    assert page.mean_sentence <= LONGEST_MEAN, f"a mean of {page.mean_sentence:.1f} words; divide {longest[:3]}"


def test_a_word_has_a_letter_or_a_digit():
    assert count_words("| a | 1.5 |\n|---|---|\n- b = c\n") == 4


def test_sentences_end_where_a_reader_stops():
    text = "One two. Three `a.b c d` four!\nFive 1.5 six? (Seven) eight, e.g. nine.\n\nTen\n- Eleven\n- Twelve.\n"
    assert list(sentences_of(text)) == [
        "One two.",
        "Three code four!",
        "Five 1.5 six?",
        "(Seven) eight, e.g. nine.",
        "Ten",
        "Eleven",
        "Twelve.",
    ]


def test_only_prose_has_sentences():
    text = "# Head\n\n| a | b |\n|---|---|\n\n```\ncode here.\n```\n\n![A picture](a.svg)\n<!-- hidden -->\n"
    assert list(sentences_of(f"{text}\nSee [a b](c.md#d).\n")) == ["See a b."]


def test_the_command_prints_each_page_and_the_sum(capsys):
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(pages()) + 2
    assert f"{sum(page.words for page in pages()):,}  all {len(pages())} pages" in lines[-1]
