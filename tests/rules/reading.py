"""Counts the words of each page of the documentation, and the length of its sentences.

`python -m tests.rules.reading` prints a line a page. A word has a letter or a digit, unlike bars of tables and marks of
lists. (`wc -w` counts them too, and finds a tenth more.) Sentences are prose, without headings, tables, code blocks and
the targets of links. A piece of inline code is one word, and each item of a list begins a sentence. docs/lab is the
laboratory: dated measurements, whose length nothing bounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "configs", "examples", "benchmarks")
LABORATORY = ROOT / "docs" / "lab"

_CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_NOT_PROSE = re.compile(r"^(\||#| *!\[|\[[^\]]*\]: )|^\W*$")  # table, heading, picture, a link's target, nothing
_ITEM = re.compile(r"^ *([-*]|\d+\.) ")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_INLINE_CODE = re.compile(r"`+[^`]+`+")
_WORD = re.compile(r"\w")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*`]*[A-Z0-9])")


@dataclass(frozen=True)
class Page:
    """A page of the documentation: its path, its words, and the words of each of its sentences."""

    path: Path
    words: int
    sentences: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def mean_sentence(self) -> float:
        return sum(self.sentences) / len(self.sentences) if self.sentences else 0.0


def pages() -> list[Page]:
    """All pages except the laboratory's, in the order of their names."""
    paths = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    return [read_page(path) for path in sorted(paths) if LABORATORY not in path.parents]


def read_page(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    return Page(path, count_words(text), tuple(count_words(sentence) for sentence in sentences_of(text)))


def count_words(text: str) -> int:
    """The words of a text that have a letter or a digit."""
    return sum(_WORD.search(word) is not None for word in text.split())


def sentences_of(text: str) -> Iterator[str]:
    """The sentences of a page's prose."""
    for paragraph in _paragraphs(_COMMENT.sub("", _CODE_BLOCK.sub("\n", text))):
        plain = _LINK.sub(r"\1", _INLINE_CODE.sub("code", paragraph))
        yield from (sentence for sentence in _SENTENCE_END.split(plain) if _WORD.search(sentence))


def _paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_prose = _NOT_PROSE.match(line) is None
        if lines and (not is_prose or _ITEM.match(line)):
            yield " ".join(lines)
            lines = []
        if is_prose:
            lines.append(_ITEM.sub("", line).strip())


def main() -> None:
    print(f"{'words':>7} {'sentences':>9} {'mean':>5} {'p90':>4} {'max':>4}")
    counted = pages()
    for page in sorted(counted, key=lambda page: -page.words):
        lengths = sorted(page.sentences) or [0]
        p90 = lengths[int(0.9 * (len(lengths) - 1))]
        print(
            f"{page.words:7,} {len(page.sentences):9,} {page.mean_sentence:5.1f} {p90:4} {lengths[-1]:4}  {page.name}"
        )
    print(f"{sum(page.words for page in counted):7,}  all {len(counted)} pages")


if __name__ == "__main__":
    main()
