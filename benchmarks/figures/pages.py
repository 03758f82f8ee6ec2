"""Writes the tables of figures of README.md and of the pages on performance from the results in docs/lab/results.

Each table is between `<!-- table: NAME -->` and `<!-- end -->`. A test compares the pages with what this module
makes, so a figure of these tables is always one of a kept result. A result without a commit is refused.

    python -m benchmarks.figures.pages      writes the tables and the chart, and prints the age of each result
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator

from benchmarks.figures.chart import CHART, draw
from benchmarks.figures.kept import KeptFigures, ages, read_result
from benchmarks.figures.shapes import RESULTS, ROOT, SHAPES
from mllm_compile.bench.measure.results import Measurement
from mllm_compile.bench.show.report import provenance, show_figure, work_name
from mllm_compile.errors import MllmError

PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "lab" / "performance.md")
BATCHES = (1, 8, 64, 256)
H100_SHAPES = tuple(shape for shape in SHAPES if shape.name in ("8b", "0.6b"))
# Columns of a table: heading, and the measurement's name.
STEPS = (
    *((f"{batch} request" + "s" * (batch > 1), f"tpot b={batch}") for batch in BATCHES),
    ("cold start", "start cold"),
    ("warm start", "start warm"),
)
PROMPTS = (
    *((f"{batch} × 512", f"prefill b={batch}") for batch in BATCHES),
    ("32 × 2,048", "prefill32x2048"),
    ("mixed256", "mixed256"),
)
HEADLINES = (
    ("0.6b", "tpot b=1", "Qwen3-0.6B, ms a token, 1 request", "{:.2f}"),
    ("0.6b", "tpot b=64", "64 requests", "{:.2f}"),
    ("8b", "tpot b=1", "Qwen3-8B, 1 request", "{:.2f}"),
    ("8b", "tpot b=64", "64 requests", "{:.2f}"),
    ("8b-fp8", "tpot b=1", "Qwen3-8B in fp8, 1 request", "{:.2f}"),
    ("8b-fp8", "tpot b=64", "64 requests", "{:.2f}"),
    ("8b-int4", "tpot b=1", "Qwen3-8B in int4, 1 request", "{:.2f}"),
    ("8b-int4", "tpot b=64", "64 requests", "{:.2f}"),
    ("30b", "tpot b=1", "Qwen3-30B-A3B, 1 request", "{:.2f}"),
    ("30b", "tpot b=64", "64 requests", "{:.2f}"),
    ("gpt-oss", "tpot b=1", "gpt-oss-20b in MXFP4, 1 request", "{:.2f}"),
    ("gpt-oss", "tpot b=64", "64 requests", "{:.2f}"),
    ("8b", "start warm", "warm start to the first token, Qwen3-8B", "{:.1f} s"),
    ("8b", "start cold", "cold start, everything compiled", "{:.0f} s"),
)


def with_tables(page: str) -> str:
    """The page's text with every table made anew."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: found[1] + "\n" + TABLES[found[2]]() + "\n" + found[3],
        page,
        flags=re.DOTALL,
    )


def headline_table() -> str:
    """The most telling lines on an H200, beside vLLM's and the limit, and where they were taken."""
    ours, theirs = _by_shape("mllm"), _by_shape("vllm")
    rows = []
    for shape, work, text, form in HEADLINES:
        line, their = (of[shape].lines.get(work) if shape in of else None for of in (ours, theirs))
        if line is not None:
            limit = "" if line.limit is None else form.format(line.limit)
            beside = "" if their is None else form.format(their.median) + _once(their)
            rows.append([text, f"**{form.format(line.median)}**", beside, limit])
    shown = {shape for shape, *_ in HEADLINES}
    header = ["one H200, bfloat16, greedy", "mllm_compile", "vLLM", "what the GPU allows"]
    if not any(row[2] for row in rows):
        header, rows = _without(2, header), [_without(2, row) for row in rows]
    works = [work for _, work, *_ in HEADLINES]
    sources = [figures.source(works) for of in (ours, theirs) for name, figures in of.items() if name in shown]
    return _markdown(header, rows) + "\n" + f"Measured: {'; '.join(dict.fromkeys(sources))}.\n"


def headline_chart() -> str:
    """The same lines as a picture, each with its whole text."""
    lines = {name: figures.lines for name, figures in _by_shape("mllm").items()}
    titles = {shape.name: shape.title for shape in SHAPES}
    texts = {"tpot b=1": "{}, 1 request", "tpot b=64": "{}, 64 requests"}
    texts |= {"start warm": "{}, warm: first token", "start cold": "{}, cold: all compiled"}
    return draw(
        [
            (texts[work].format(titles[shape]), lines[shape][work], form)
            for shape, work, _, form in HEADLINES
            if work in lines.get(shape, {})
        ]
    )


def work_table() -> str:
    """Steps and starts of each shape on an H200: ours ± half of the spread, vLLM's, the limit."""
    ours, theirs = _by_shape("mllm"), _by_shape("vllm")
    works = [work for _, work in (*STEPS, *PROMPTS)]
    sources = [
        f"{shape.title}: " + ", ".join(of[shape.name].source(works) for of in (ours, theirs) if shape.name in of)
        for shape in SHAPES
        if shape.name in ours
    ]
    table = _side_by_side("tpot in ms, starts in s", STEPS, ours, theirs)
    return table + "\n" + f"Measured: {'; '.join(sources)}.\n"


def prompts_table() -> str:
    """Prompts of each shape on an H200, likewise."""
    heading = "prompts of 512 in ms, others in tokens a second"
    return _side_by_side(heading, PROMPTS, _by_shape("mllm"), _by_shape("vllm"))


def _side_by_side(
    corner: str, columns: tuple[tuple[str, str], ...], ours: dict[str, KeptFigures], theirs: dict[str, KeptFigures]
) -> str:
    names = [work for _, work in columns]
    rows = []
    for shape in (shape for shape in SHAPES if shape.name in ours):
        lines = ours[shape.name].lines
        rows.append([f"**{shape.title}**", *(_with_spread(lines.get(name)) for name in names)])
        if shape.name in theirs:
            version, their = theirs[shape.name].run.version, theirs[shape.name].lines
            rows.append([f"vLLM {version}", *(_with_spread(their.get(name)) for name in names)])
        rows.append(["limit", *(_limit(lines.get(name)) for name in names)])
    return _markdown([corner, *(heading for heading, _ in columns)], rows)


def h100_table() -> str:
    """Time per output token on an H100, as a figure and a share of the limit of the same command."""
    kept = [(shape, KeptFigures.of(shape, "mllm", "h100")) for shape in H100_SHAPES]
    rows = [
        [f"{shape.title} ({figures.source(_at_batches('tpot'))})", *_shares(figures, "tpot")]
        for shape, figures in kept
        if figures is not None
    ]
    return _markdown(["tpot", "1 request", *map(str, BATCHES[1:])], rows)


def experts_table() -> str:
    """Qwen3-30B-A3B's latency on an H200, as figures and shares of the limit of the same command."""
    figures = _by_shape("mllm").get("30b")
    if figures is None:
        return "Not measured yet.\n"
    rows = [[name, *_shares(figures, name)] for name in ("tpot", "prefill")]
    table = _markdown(["", "1 request", *map(str, BATCHES[1:])], rows)
    source = figures.source([*_at_batches("tpot"), *_at_batches("prefill")])
    return table + "\n" + f"{source}; {'; '.join(provenance(figures.whole)[1:])}.\n"


def long_table() -> str:
    """Long contexts of Qwen3-8B on an H100, with the limit of the same command."""
    rows = []
    for path in sorted(RESULTS.glob("h100-qwen-8b-shape-long*.json")):
        for line in read_result(path).runs[0].measurements:
            rows.append([work_name(line), line.unit, _with_spread(line), _limit(line), f"{line.share_of_limit:.0%}"])
    return _markdown(["work", "unit", "Qwen3-8B", "limit", "share"], rows)


def switches_table() -> str:
    """The change by leaving out each switch of Qwen3-0.6B's latency."""
    return _ablation("qwen-shape", [("tpot", 1), ("tpot", 8), ("tpot", 64), ("tpot", 256), ("prefill", 64)])


def expert_switches_table() -> str:
    """The change by leaving out each pass of experts of four layers of Qwen3-30B-A3B."""
    keys = [(name, batch) for name in ("tpot", "prefill") for batch in (1, 8, 64)]
    return _ablation("qwen-30b-a3b-4-layers", keys)


def _ablation(shape: str, keys: list[tuple[str, int]]) -> str:
    result = read_result(RESULTS / f"h200-{shape}-ablation.json")
    header = ["left out", *(f"{name} b={batch}" for name, batch in keys)]
    rows = []
    whole = {line.key: line.median for line in result.runs[0].measurements}
    for run in result.runs:
        at = {line.key: line.median for line in run.measurements}
        changes = (f"{at[key] / whole[key] - 1:+.1%}" for key in keys)
        figures = (f"{show_figure(whole[key])} ms" for key in keys) if run is result.runs[0] else changes
        rows.append([run.engine, *figures])
    return _markdown(header, rows)


def _by_shape(engine: str) -> dict[str, KeptFigures]:
    """The engine's figures on an H200 by the shape's short name."""
    kept = {shape.name: KeptFigures.of(shape, engine, "h200") for shape in SHAPES}
    return {name: figures for name, figures in kept.items() if figures is not None}


def _shares(figures: KeptFigures, name: str) -> Iterator[str]:
    """The cells of the work at each batch."""
    return (_with_share(figures.lines.get(work)) for work in _at_batches(name))


def _at_batches(name: str) -> list[str]:
    """The names of its measurements at each batch."""
    return [f"{name} b={batch}" for batch in BATCHES]


def _once(line: Measurement | None) -> str:
    """The mark of a figure of another engine that was taken once, where no figure has its spread."""
    return " (once)" if line is not None and len(line.samples) == 1 else ""


def _figure(line: Measurement | None) -> str:
    return "" if line is None else show_figure(line.median)


def _limit(line: Measurement | None) -> str:
    return "" if line is None or line.limit is None else show_figure(line.limit)


def _with_spread(line: Measurement | None) -> str:
    spread = "" if line is None or len(line.samples) == 1 else f" ± {line.spread / 2:.1%}"
    return _figure(line) + spread


def _with_share(line: Measurement | None) -> str:
    return "" if line is None else f"{show_figure(line.median)} {line.unit}, {line.share_of_limit:.0%}"


def _without(index: int, row: list[str]) -> list[str]:
    return row[:index] + row[index + 1 :]


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, rule, *rows])


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline_table,
    "work": work_table,
    "prompts": prompts_table,
    "h100": h100_table,
    "long": long_table,
    "experts": experts_table,
    "switches": switches_table,
    "expert_switches": expert_switches_table,
}


def main() -> int:
    try:
        for page in PAGES:
            page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
        CHART.write_text(headline_chart(), encoding="utf-8")
        print(*ages(), sep="\n")
    except MllmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
