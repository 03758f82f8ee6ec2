"""Draws the headline table as a chart, docs/headline.svg: a bar for each figure, a mark where the GPU's limit is.

Each group has a scale of its own: milliseconds a token, and seconds of a start. Colours follow the reader's theme.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.figures.shapes import ROOT
from mllm_compile.bench.measure.results import Measurement

CHART = ROOT / "docs" / "headline.svg"
_WIDTH, _LABELS, _BARS = 760, 250, 400  # of the picture, of the texts at the left, of the longest bar
_ROW, _BAR, _HEADING = 28, 16, 34
_STYLE = """\
text { font: 14px system-ui, sans-serif; fill: #1f2328; }
.heading { font-weight: 600; }
.bar { fill: #1f6feb; }
.limit { stroke: #1f2328; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .bar { fill: #4493f8; }
  .limit { stroke: #e6edf3; }
}"""

Bar = tuple[str, Measurement, str]  # its text, the figure, and how that is written


def draw(bars: Sequence[Bar]) -> str:
    """The picture, as SVG."""
    steps = [bar for bar in bars if bar[1].limit is not None]
    starts = [bar for bar in bars if bar[1].limit is None]
    parts: list[str] = []
    height = 0
    for heading, group in (("milliseconds a token; │ is what the GPU allows", steps), ("seconds of a start", starts)):
        if group:
            parts.append(f'<text class="heading" x="0" y="{height + 20}">{heading}</text>')
            parts += _rows(group, height + _HEADING)
            height += _HEADING + len(group) * _ROW + 10
    view = f'viewBox="0 0 {_WIDTH} {height}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img">\n<style>\n{_STYLE}\n</style>\n{body}\n</svg>\n'


def _rows(group: Sequence[Bar], top: float) -> Iterator[str]:
    scale = _BARS / max(line.median for _, line, _ in group)
    for index, (text, line, form) in enumerate(group):
        y = top + index * _ROW
        end = _LABELS + line.median * scale
        yield f'<text x="{_LABELS - 10}" y="{y + 13}" text-anchor="end">{escape(text)}</text>'
        yield f'<rect class="bar" x="{_LABELS}" y="{y}" width="{end - _LABELS:.1f}" height="{_BAR}" rx="2"/>'
        yield f'<text x="{end + 8:.1f}" y="{y + 13}">{form.format(line.median)}</text>'
        if line.limit is not None:
            x = f"{_LABELS + line.limit * scale:.1f}"
            yield f'<line class="limit" x1="{x}" x2="{x}" y1="{y - 3}" y2="{y + _BAR + 3}"/>'
