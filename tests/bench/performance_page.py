"""Writes the tables of figures of README.md and docs/performance.md from the results in docs/performance/results.

Each table stands between `<!-- table: NAME -->` and `<!-- end -->`. A test compares the pages with what this module
makes, so a figure of these tables is always one of a kept result.

    python -m tests.bench.performance_page
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mllm_compile.bench.measure.results import BenchResult, Measurement
from mllm_compile.bench.show.report import show_figure, work_name

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS.parent / "README.md", DOCS / "performance.md")
RESULTS = DOCS / "performance" / "results"
SHAPES = {"qwen-8b-shape": "Qwen3-8B", "qwen-shape": "Qwen3-0.6B"}


def with_tables(page: str) -> str:
    """Returns the page's text with every table made anew."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: found[1] + "\n" + TABLES[found[2]]() + "\n" + found[3],
        page,
        flags=re.DOTALL,
    )


def headline_table() -> str:
    """The most telling lines of both shapes on an H200, beside vLLM's and the limit."""
    ours, theirs = ({shape: _measured(prefix, shape) for shape in SHAPES} for prefix in ("h200", "vllm-h200"))
    rows = []
    for shape, work, text, form in (
        ("qwen-shape", "tpot b=1", "Qwen3-0.6B, ms a token, 1 request", "{:.2f}"),
        ("qwen-shape", "tpot b=64", "64 requests", "{:.2f}"),
        ("qwen-8b-shape", "tpot b=1", "Qwen3-8B, 1 request", "{:.2f}"),
        ("qwen-8b-shape", "tpot b=64", "64 requests", "{:.2f}"),
        ("qwen-8b-shape", "start warm", "warm start to the first token, Qwen3-8B", "{:.1f} s"),
        ("qwen-8b-shape", "start cold", "cold start, everything compiled", "{:.0f} s"),
    ):
        line = ours[shape][work]
        limit = "" if line.limit is None else form.format(line.limit)
        rows.append([text, f"**{form.format(line.median)}**", form.format(theirs[shape][work].median), limit])
    return _markdown(["one H200, bfloat16, greedy", "mllm_compile", "vLLM 0.24", "what the GPU allows"], rows)


def work_table() -> str:
    """Both shapes on an H200: ours ± half of the spread, vLLM's, the limit."""
    header = ["work", "unit"]
    lines: dict[str, list[str]] = {}
    for shape, name in SHAPES.items():
        header += [name, "vLLM", "limit"]
        ours, theirs = _measured("h200", shape), _measured("vllm-h200", shape)
        for key, line in ours.items():
            row = lines.setdefault(key, [key, line.unit])
            row += [_with_spread(line), _figure(theirs.get(key)), "" if line.limit is None else show_figure(line.limit)]
    names = [key.partition(" b=")[0] for key in lines]
    return _markdown(header, sorted(lines.values(), key=lambda row: names.index(row[0].partition(" b=")[0])))


def h100_table() -> str:
    """Time per output token on an H100, as a figure and a share of the limit of the same command."""
    header = ["tpot", "1 request", *(str(batch) for batch in (8, 64, 256))]
    rows = []
    for shape, name in SHAPES.items():
        lines = [line for line in _measured("h100", shape).values() if line.name == "tpot"]
        rows.append([name, *map(_with_share, lines)])
    return _markdown(header, rows)


def experts_table() -> str:
    """Qwen3-30B-A3B's latency on an H200, as figures and shares of the limit of the same command."""
    lines = _measured("h200", "qwen-30b-a3b-shape").values()
    rows = [[name, *(_with_share(line) for line in lines if line.name == name)] for name in ("tpot", "prefill")]
    return _markdown(["", "1 request", *(str(batch) for batch in (8, 64, 256))], rows)


def long_table() -> str:
    """Long contexts of Qwen3-8B on an H100, with the limit of the same command."""
    rows = []
    for path in sorted(RESULTS.glob("h100-qwen-8b-shape-long*.json")):
        for line in BenchResult.read(path).runs[0].measurements:
            limit = "" if line.limit is None else show_figure(line.limit)
            rows.append([work_name(line), line.unit, _with_spread(line), limit, f"{line.share_of_limit:.0%}"])
    return _markdown(["work", "unit", "Qwen3-8B", "limit", "share"], rows)


def levers_table() -> str:
    """What leaving out each lever changes of Qwen3-0.6B's latency."""
    return _ablation("qwen-shape", [("tpot", 1), ("tpot", 8), ("tpot", 64), ("tpot", 256), ("prefill", 64)])


def expert_levers_table() -> str:
    """What leaving out each pass of experts changes of four layers of Qwen3-30B-A3B."""
    keys = [(name, batch) for name in ("tpot", "prefill") for batch in (1, 8, 64)]
    return _ablation("qwen-30b-a3b-4-layers", keys)


def _ablation(shape: str, keys: list[tuple[str, int]]) -> str:
    result = BenchResult.read(RESULTS / f"h200-{shape}-ablation.json")
    header = ["left out", *(f"{name} b={batch}" for name, batch in keys)]
    rows = []
    whole = {line.key: line.median for line in result.runs[0].measurements}
    for run in result.runs:
        at = {line.key: line.median for line in run.measurements}
        changes = (f"{at[key] / whole[key] - 1:+.1%}" for key in keys)
        figures = (f"{show_figure(whole[key])} ms" for key in keys) if run is result.runs[0] else changes
        rows.append([run.engine, *figures])
    return _markdown(header, rows)


def _measured(prefix: str, shape: str) -> dict[str, Measurement]:
    """{work's name: its measurement} of all results that are called `prefix`-`shape`-…, stages of starts left out."""
    return {
        work_name(line): line
        for kind in ("latency", "long", "gaps", "throughput", "startup")
        if (path := RESULTS / f"{prefix}-{shape}-{kind}.json").exists()
        for line in BenchResult.read(path).runs[0].measurements
        if ":" not in line.name
    }


def _figure(line: Measurement | None) -> str:
    return "" if line is None else show_figure(line.median)


def _with_spread(line: Measurement) -> str:
    return _figure(line) if len(line.samples) == 1 else f"{_figure(line)} ± {line.spread / 2:.1%}"


def _with_share(line: Measurement) -> str:
    return f"{show_figure(line.median)} {line.unit}, {line.share_of_limit:.0%}"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, rule, *rows])


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline_table,
    "work": work_table,
    "h100": h100_table,
    "long": long_table,
    "experts": experts_table,
    "levers": levers_table,
    "expert_levers": expert_levers_table,
}


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
