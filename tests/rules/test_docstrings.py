"""A docstring begins with its subject or with an imperative, and has no phrase that has to be read twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("mllm_compile", "passes", "runtime", "benchmarks", "examples", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# "What it computes", "Whether it fits", "Of a tile", "As generate": say "The result", "True if", "Rows of", "Like".
REFUSED = frozenset({"What", "Whether", "Of", "As", "Which", "Those", "In", "By", "Who"})
IN_TESTS = REFUSED - {"Of", "As", "In", "By"}  # there the function's name is the subject
# "whoever calls this", "None where there is none", "it is none of these", "tokens, of which one is text", "those of the
# prompt", "its rows lie in memory", "what comes back": say "the caller", "or None", "another type", "tokens, one of
# them text", "the prompt's", "its rows are in memory", "the results".
ODD = re.compile(
    r"\bwhoever\b|\b(?:where|if) there (?:is|are) none\b|\b(?:is|are) none of\b|: (?:it|there) (?:is|are) (?-i:none)\b"
    r"|\bof (?:which|whom)\b|\b(?:are|is|as|than) th(?:ose|at) of\b|, those of\b"
    r"|\b(?:lies|stands) (?:in|at|on|between)\b"
    r"|\bwhat (?:comes|came|waits|goes wrong|runs|is off|is not there|has been)\b",
    re.IGNORECASE,
)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The docstrings of the module, its classes, functions and attributes: every string that is a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def refused(source: str, words: frozenset[str] = REFUSED) -> list[str]:
    """Line and first line, or phrase, of each docstring that begins with one of `words` or has an odd phrase."""
    found = []
    for node in docstrings(ast.parse(source)):
        text = str(node.value).strip()
        first_word = re.match(r"\w*", text)
        if first_word and first_word[0] in words:
            found.append(f"line {node.lineno}: {text.splitlines()[0]}")
        found += [f"line {node.lineno}: {phrase}" for phrase in ODD.findall(" ".join(text.split()))]
    return found


def test_every_docstring_begins_with_its_subject_and_has_no_odd_phrase():
    assert len(SOURCES) > 200
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        words = IN_TESTS if path.is_relative_to(ROOT / "tests") else REFUSED
        found[str(path.relative_to(ROOT))] = refused(path.read_text(encoding="utf-8"), words)
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "source",
    [
        '"""What a step needs."""',
        'class Tile:\n    """\n    Of a tile.\n    """',
        'def fits():\n    """Whether it fits."""',
        'class Config:\n    size: int\n    """In bytes."""',
        '"""The tower; None where there\n    is none."""',
        'def keep():\n    """Whoever calls this keeps it."""',
        '"""Tokens, of which\n    one is text."""',
        '"""Its pages are those of the prompt."""',
        '"""A row lies in memory."""',
        '"""Takes what comes back."""',
    ],
)
def test_a_clause_would_be_found(source):
    assert refused(source)


@pytest.mark.parametrize("source", ['"""Inputs of a step."""', '"""True if it fits."""', 'def f():\n    return "What"'])
def test_a_sentence_and_a_string_that_is_no_docstring_are_left_alone(source):
    assert not refused(source)
