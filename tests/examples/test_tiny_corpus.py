"""The embedded model's corpus: plain Python, nothing imported from the modules that it reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "tiny_models"))
from tiny_corpus import MAX_CHATS, MIN_COPIED_CHARS, Corpus, Document, Entry, read_corpus


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus()


def paragraphs(documents: list[Document]) -> set[str]:
    found = (" ".join(p.split()) for d in documents for entry in d.entries for p in entry.doc.split("\n\n"))
    return {paragraph for paragraph in found if len(paragraph) >= MIN_COPIED_CHARS}


def num_bytes(documents: list[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def test_the_corpus_is_the_same_each_time_it_is_read(corpus: Corpus) -> None:
    assert read_corpus() == corpus


def test_no_paragraph_of_the_held_out_text_is_in_the_training_or_validation_text(corpus: Corpus) -> None:
    assert not paragraphs(corpus.held_out) & paragraphs(corpus.train)
    assert not paragraphs(corpus.held_out) & paragraphs(corpus.validation)
    assert not paragraphs(corpus.validation) & paragraphs(corpus.train)


def test_a_few_per_cent_of_the_text_are_held_out_from_both_the_reference_and_the_modules(corpus: Corpus) -> None:
    total_bytes = num_bytes(corpus.train) + num_bytes(corpus.validation) + num_bytes(corpus.held_out)
    assert 0.02 < num_bytes(corpus.held_out) / total_bytes < 0.05
    assert {document.name.split()[0] for document in corpus.held_out} == {"topic", "module"}


def test_docstrings_appear_under_their_heading_as_help_prints_them(corpus: Corpus) -> None:
    text = next(document.text for document in corpus.train if document.name == "module posixpath")
    assert text.startswith("Help on module posixpath:\n\n")
    assert "posixpath.join(a, *p)\n    Join two or more pathname components" in text


def test_tests_and_third_party_packages_are_no_part_of_the_corpus(corpus: Corpus) -> None:
    names = {document.name for document in corpus.train}
    assert not [name for name in names if name.startswith(("module test.", "module site-packages", "module idlelib"))]
    assert "module pip" not in names


def test_chats_ask_about_public_names_of_the_training_text_and_answer_in_one_sentence(corpus: Corpus) -> None:
    assert 300 <= len(corpus.chats) <= MAX_CHATS
    for question, answer in corpus.chats:
        assert question.endswith("?") and "._" not in question
        assert "\n" not in answer and answer.endswith(".")


def test_an_entry_is_rendered_with_its_docstring_indented() -> None:
    document = Document("module m", [Entry("function", "m.f", "m.f(x)", "Do it.\n\nTwice.")])
    assert document.text == "m.f(x)\n    Do it.\n\n    Twice.\n"
