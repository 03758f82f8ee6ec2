"""Pieces of HTML that the report is made of. Everything that comes from a runtime is escaped here.

Arguments called `body`, and every `Html`, are HTML already; all others are text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

COLOURS = ("var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)")
_WIDTH = 1100
_ROW = 22
_LABEL = 250
_MOST_TICKS = 12


class Html(str):
    """Text that is HTML, and not to be escaped again."""

    __slots__ = ()


def html_of(text: str) -> str:
    """The text escaped, unless it is Html."""
    return text if isinstance(text, Html) else escape(text)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Iterable[int] = (),
    caption: str = "",
    has_total: bool = False,
) -> str:
    """A table whose rows are named by their first cell.

    Args:
        numbers: columns that are aligned to the right.
        caption: for screen readers; not shown.
        has_total: the last row is a sum.
    """
    right = set(numbers)
    cell_class = [' class="n"' if index in right else "" for index in range(len(columns))]
    head = "".join(f'<th scope="col"{cell_class[i]}>{html_of(name)}</th>' for i, name in enumerate(columns))
    names = [f' data-name="{escape(name)}"' for name in columns]  # beside each cell where a screen is narrow
    rows = list(rows)
    body = "".join(
        f"<tr{' class=total' if has_total and number == len(rows) - 1 else ''}>"
        + f'<th scope="row">{html_of(row[0])}</th>'
        + "".join(f"<td{cell_class[i]}{names[i]}>{html_of(cell)}</td>" for i, cell in enumerate(row) if i)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    hidden = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{hidden}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(title: str, remark: str, right: str, body: str) -> str:
    """A line that opens when clicked."""
    return (
        f"<details><summary><b>{html_of(title)}</b><span>{html_of(remark)}</span>"
        f'<span class="right">{html_of(right)}</span></summary>{body}</details>'
    )


def source(text: str) -> str:
    return f'<pre tabindex="0">{escape(text)}</pre>'


def diff(lines: Sequence[str], left_out: int) -> str:
    """A unified diff, coloured."""
    shown = []
    for line in lines:
        kind = {"+": "a", "-": "c", "@": "h"}.get(line[:1])
        shown.append(f'<span class="{kind}">{escape(line)}</span>' if kind else escape(line) + "\n")
    more = f'<span class="h">… {left_out} more lines: see the graphs folder</span>' if left_out else ""
    return f'<pre tabindex="0">{"".join(shown)}{more}</pre>'


def figures(pairs: Iterable[tuple[str, str]]) -> str:
    """Large values, each over its name."""
    cells = "".join(f"<div><dd>{html_of(value)}</dd><dt>{html_of(name)}</dt></div>" for name, value in pairs)
    return f'<dl class="figures">{cells}</dl>'


def chips(texts: Iterable[str]) -> str:
    return '<ul class="chips">' + "".join(f"<li>{html_of(text)}</li>" for text in texts) + "</ul>"


def note(text: str) -> str:
    return f'<p class="note">{html_of(text)}</p>'


def code(text: str) -> Html:
    return Html(f"<code>{escape(text)}</code>")


def swatch(colour: str, name: str, detail: str) -> Html:
    """A name with its colour before it and what it holds below it."""
    below = f"<small>{escape(detail)}</small>" if detail else ""
    return Html(f'<i class="swatch" style="background:{colour}"></i>{escape(name)}{below}')


def share_bar(share: float, text: str) -> Html:
    """A share of 0 to 1 as a bar with its text."""
    width = min(1.0, max(0.0, share)) * 100
    return Html(f'<span class="share"><span style="width:{width:.1f}%"></span></span>{escape(text)}')


def strip(columns: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], label: str) -> str:
    """Columns side by side, each of segments side by side, all to one scale.

    Args:
        columns: (name below it, [(what it says when pointed at, size, colour)]).
        label: its description, for screen readers.
    """
    total = sum(size for _, segments in columns for _, size, _ in segments) or 1.0
    every = -(-len(columns) // _MOST_TICKS)
    last = max((int(name) for name, _ in columns if name.isdigit()), default=0)
    shown = []
    for name, segments in columns:
        parts = "".join(
            f'<b style="flex:{size / total * 1000:.3f} 1 0;background:{colour}" title="{escape(text)}"></b>'
            for text, size, colour in segments
        )
        width = sum(size for _, size, _ in segments) / total * 1000
        tick = "" if name.isdigit() and not _has_tick(int(name), every, last) else escape(name)
        # The last number of many ends with its column: a word comes behind it.
        style = ' class="end"' if name == str(last) and every > 1 else ""
        shown.append(f'<li style="flex:{width:.3f} 1 0"{style}><span class="bar">{parts}</span><em>{tick}</em></li>')
    return f'<ol class="strip" role="img" aria-label="{escape(label)}">{"".join(shown)}</ol>'


def _has_tick(number: int, every: int, last: int) -> bool:
    """True of the last, and of each multiple that is not right beside it."""
    return number == last or (number % every == 0 and last - number >= min(every, 2))


def stacked_bar(parts: Sequence[tuple[str, float, str]], label: str) -> str:
    """One bar, its parts to scale, and what they are.

    Args:
        parts: (name, size, size as text).
        label: its description, for screen readers.
    """
    total = sum(size for _, size, _ in parts) or 1.0
    bars = "".join(
        f'<b style="flex:{size / total * 1000:.3f} 1 0;background:{colour(index)}"'
        f' title="{escape(name)}: {escape(text)}"></b>'
        for index, (name, size, text) in enumerate(parts)
    )
    legend = "".join(
        f'<li><i class="swatch" style="background:{colour(index)}"></i>{escape(name)} <b>{escape(text)}</b></li>'
        for index, (name, _, text) in enumerate(parts)
    )
    return (
        f'<div class="strip stacked" role="img" aria-label="{escape(label)}"><span class="bar">{bars}</span></div>'
        f'<ul class="legend">{legend}</ul>'
    )


def gantt(spans: Sequence[tuple[str, float, float, int]], label: str) -> str:
    """A row a stage over one axis of seconds.

    Args:
        spans: (name, start in s, end in s, depth).
        label: its description, for screen readers.
    """
    total = max((end for _, _, end, _ in spans), default=0.0) or 1.0
    scale = (_WIDTH - _LABEL - 70) / total
    rows = []
    for index, (name, start, end, depth) in enumerate(spans):
        y = index * _ROW
        x, width = _LABEL + start * scale, max(2.0, (end - start) * scale)
        rows.append(
            f'<text x="{4 + depth * 14}" y="{y + 15}">{escape(name)}</text>'
            f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="14" rx="3" fill="{colour(depth)}">'
            f"<title>{escape(name)}: {start:.2f} s to {end:.2f} s</title></rect>"
            f'<text class="soft" x="{x + width + 6:.1f}" y="{y + 15}">{end - start:.2f} s</text>'
        )
    return (
        f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {len(spans) * _ROW + 4}" role="img"'
        f' aria-label="{escape(label)}">{"".join(rows)}</svg></div>'
    )


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
