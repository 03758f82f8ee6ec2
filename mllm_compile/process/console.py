"""Prints tables for people: rich on a terminal, aligned plain text in a pipe (where rich would cut at 80 columns)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TextIO

_WIDTH = 100  # of what is no terminal
_SHORTEST = 8


def text_width(stream: TextIO) -> int:
    """Columns that a line may take: the terminal's ($COLUMNS, where it is set), or 100 in a pipe."""
    return shutil.get_terminal_size((_WIDTH, 24)).columns if stream.isatty() else _WIDTH


def fitted(
    stream: TextIO, columns: Sequence[str], rows: Sequence[Sequence[str]], cut: str, drop: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """A table's columns and rows as they fit the stream's width.

    Args:
        cut: the column that is shortened to what the others leave, though not below _SHORTEST.
        drop: columns to leave out while that does not do, the first one first.
    """
    dropped: set[str] = set()
    left = list(drop)
    while True:
        kept = [index for index, column in enumerate(columns) if column not in dropped]
        gap = 3 if stream.isatty() else 2  # rich's, and _print_plain's
        others = sum(gap + max(len(row[i]) for row in (columns, *rows)) for i in kept if columns[i] != cut)
        room = text_width(stream) - others - gap - 2
        if room >= max([_SHORTEST, len(cut)]) or not left:
            break
        dropped.add(left.pop(0))
    room = max(room, _SHORTEST)
    shown = [[_shortened(row[i], room) if columns[i] == cut else row[i] for i in kept] for row in rows]
    return [columns[i] for i in kept], shown


def _shortened(text: str, width: int) -> str:
    """Cuts the front: the end tells more, as of a folder the name."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def print_table(stream: TextIO, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table. Columns whose every cell starts with a digit are aligned to the right."""
    is_number = [bool(rows) and all(row[i][:1].isdigit() for row in rows) for i in range(len(columns))]
    if stream.isatty():
        _print_rich(stream, title, columns, rows, is_number)
    else:
        _print_plain(stream, title, columns, rows, is_number)


def _print_rich(
    stream: TextIO, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], is_number: list[bool]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name, number in zip(columns, is_number, strict=True):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=stream).print(table)


def _print_plain(
    stream: TextIO, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], is_number: list[bool]
) -> None:
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    print(title, file=stream)
    for row in (columns, *rows):
        cells = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, is_number, strict=True)
        )
        print(f"  {'  '.join(cells)}".rstrip(), file=stream)
    stream.flush()
