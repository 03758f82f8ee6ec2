"""Pieces of HTML that the report is made of. Everything that comes from a runtime is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

COLOURS = ("var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)")
_WIDTH = 1100
_ROW = 22
_LABEL = 250


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Cells are escaped; columns of `numbers` are aligned to the right."""
    right = set(numbers)
    cell_class = [' class="n"' if index in right else "" for index in range(len(columns))]
    head = "".join(f"<th{cell_class[i]}>{escape(name)}</th>" for i, name in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(f"<td{cell_class[i]}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def folded(title: str, remark: str, right: str, body: str) -> str:
    """A line that opens; `body` is HTML."""
    return (
        f"<details><summary><b>{escape(title)}</b><span>{escape(remark)}</span>"
        f'<span class="right">{escape(right)}</span></summary>{body}</details>'
    )


def source(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def diff(lines: Sequence[str], left_out: int) -> str:
    """A unified diff, coloured."""
    shown = []
    for line in lines:
        kind = {"+": "a", "-": "c", "@": "h"}.get(line[:1])
        shown.append(f'<span class="{kind}">{escape(line)}</span>' if kind else escape(line) + "\n")
    more = f'<span class="h">… {left_out} more lines: see the graphs folder</span>' if left_out else ""
    return f"<pre>{''.join(shown)}{more}</pre>"


def figures(pairs: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<div>{escape(value)}<span>{escape(name)}</span></div>" for name, value in pairs)
    return f'<div class="figures">{cells}</div>'


def chips(texts: Iterable[str]) -> str:
    return '<div class="chips">' + "".join(f"<span>{escape(text)}</span>" for text in texts) + "</div>"


def stacked_bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar, its parts to scale.

    Args:
        parts: (name, size, size as text).
    """
    total = sum(size for _, size, _ in parts) or 1.0
    bars, at = [], 0.0
    for index, (name, size, text) in enumerate(parts):
        width = size / total * _WIDTH
        bars.append(
            f'<rect x="{at:.1f}" y="0" width="{width:.1f}" height="34" fill="{_colour(index)}">'
            f"<title>{escape(name)}: {escape(text)}</title></rect>"
        )
        at += width
    legend = "".join(
        f'<span><i style="background:{_colour(index)}"></i>{escape(name)} {escape(text)}</span>'
        for index, (name, _, text) in enumerate(parts)
    )
    return f'<svg viewBox="0 0 {_WIDTH} 34" role="img">{"".join(bars)}</svg><div class="legend">{legend}</div>'


def gantt(spans: Sequence[tuple[str, float, float, int]]) -> str:
    """A row a stage over one axis of seconds.

    Args:
        spans: (name, start in s, end in s, depth).
    """
    total = max((end for _, _, end, _ in spans), default=0.0) or 1.0
    scale = (_WIDTH - _LABEL - 70) / total
    rows = []
    for index, (name, start, end, depth) in enumerate(spans):
        y = index * _ROW
        x, width = _LABEL + start * scale, max(2.0, (end - start) * scale)
        rows.append(
            f'<text x="{4 + depth * 14}" y="{y + 15}">{escape(name)}</text>'
            f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="14" rx="3" fill="{_colour(depth)}">'
            f"<title>{escape(name)}: {start:.2f} s to {end:.2f} s</title></rect>"
            f'<text class="soft" x="{x + width + 6:.1f}" y="{y + 15}">{end - start:.2f} s</text>'
        )
    return f'<svg viewBox="0 0 {_WIDTH} {len(spans) * _ROW + 4}" role="img">{"".join(rows)}</svg>'


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
