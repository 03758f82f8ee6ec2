"""Plots latency against batch size, a line an engine, with the machine's limit and each engine's share of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.measure.results import BenchResult, EngineRun, Measurement
from mllm_compile.bench.show.report import show_figure

_TITLES = {"tpot": "Time per output token", "prefill": "Time to the first token of all prompts"}
# Okabe and Ito's, which colour-blind people tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_SOFT = "#5b6470"
_MOST_VALUES = 9  # of one line; more would be in each other's way
_LIMIT_NAME = "limit: measured ceilings"

INSTALL = "pip install -e '.[bench]'"  # docs/benchmarks.md says it, too; a test compares


def check_picture(path: Path) -> None:
    """Refuses a picture that cannot be drawn before anything is measured for it.

    Raises:
        BenchmarkError: matplotlib is not installed, or does not write files with this ending.
    """
    known = sorted(figure_class()().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise BenchmarkError(f"--plot {path}: expected a file that ends in one of {', '.join(known)}")


def figure_class() -> Any:
    """Figure of matplotlib.

    Raises:
        BenchmarkError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchmarkError(f"--plot needs matplotlib: {INSTALL} in the repository") from None
    return Figure


def plot_latency(result: BenchResult, path: Path) -> None:
    """Writes a picture of `tpot` and `prefill`; the file's ending says which format.

    Raises:
        BenchmarkError: matplotlib is not installed, or it cannot write this file.
    """
    try:
        draw_latency(result).savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"--plot {path} cannot be written: {error}") from None


def draw_latency(result: BenchResult) -> Any:
    """The picture as a matplotlib Figure: over each other the times, and where limits are known the shares of them.

    Of one batch size the times are bars, of several lines.
    """
    names = [name for name in _TITLES if any(_lines(run, name) for run in result.runs)]
    has_share = any(_limits(result, name) for name in names)
    has_lines = len(_batches(result)) > 1
    if not has_lines:
        figure = figure_class()(figsize=(11, 1.9 + 0.55 * len(result.runs)), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            _draw_bars(axes, result, name)
    else:
        heights = [3, 1.1] if has_share else [1]
        figure = figure_class()(figsize=(12, 6.6 if has_share else 5), layout="constrained")
        grid = figure.subplots(len(heights), len(names), squeeze=False, sharex=True, height_ratios=heights)
        for column, name in enumerate(names):
            _draw_times(grid[0][column], result, name)
            if has_share:
                _draw_shares(grid[1][column], result, name)
            grid[-1][column].set_xlabel("requests in the batch")
    figure.suptitle(_title(result), fontsize=13, fontweight="bold", x=0.01, ha="left")
    figure.supxlabel(_where(result), fontsize=8.5, color=_SOFT, x=0.99, ha="right")
    return figure


def _title(result: BenchResult) -> str:
    return f"{result.model} on {result.environment.get('device', '?')}{_shape(result)}"


def _shape(result: BenchResult) -> str:
    work = result.work
    if "input_len" not in work or "output_len" not in work:
        return ""
    return f": prompts of {work['input_len']} tokens, answers of {work['output_len']}"


def _where(result: BenchResult) -> str:
    dtypes = dict.fromkeys(str(run.settings.get("dtype", "")) for run in result.runs)
    facts = [", ".join(filter(None, dtypes))]
    facts += [f"{name} {result.environment[name]}" for name in ("torch", "commit") if name in result.environment]
    facts.append(result.environment.get("date", "").partition(" ")[0])
    return " · ".join(filter(None, facts))


def _draw_times(axes: Any, result: BenchResult, name: str) -> None:
    """Draws a line an engine over its samples' range, the limit below, a value at each point."""
    for index, run in enumerate(result.runs):
        lines, colour = _lines(run, name), COLOURS[index % len(COLOURS)]
        medians = [line.median for line in lines]
        below = [max(0.0, line.median - min(line.samples)) for line in lines]
        above = [max(0.0, max(line.samples) - line.median) for line in lines]
        batches = [line.batch for line in lines]
        axes.errorbar(
            batches, medians, yerr=[below, above], marker="o", ms=5, capsize=3, color=colour, label=run.engine
        )
        for line in _spread(lines):
            # The first engine's values are below its line, the others' above theirs.
            side = -1 if index == 0 and len(result.runs) > 1 else 1
            _write_value(axes, line.batch, line.median, show_figure(line.median), colour, side)
    limits = _limits(result, name)
    if limits:
        batches, times = [line.batch for line in limits], [line.limit for line in limits]
        axes.plot(batches, times, "--", color=_SOFT, label=_LIMIT_NAME)
    axes.set_title(f"{_TITLES[name]}, {_unit(result, name)}", loc="left", fontsize=11)
    axes.set_yscale("log")
    axes.margins(x=0.08, y=0.14)
    plain_ticks(axes.yaxis)
    _batch_axis(axes, result)
    axes.legend(frameon=False, fontsize=9)


def _draw_shares(axes: Any, result: BenchResult, name: str) -> None:
    limits = {line.batch: line.limit for line in _limits(result, name)}
    for index, run in enumerate(result.runs):
        lines = [replace(line, limit=limits[line.batch]) for line in _lines(run, name) if line.batch in limits]
        colour = COLOURS[index % len(COLOURS)]
        axes.plot([line.batch for line in lines], list(map(_percent, lines)), marker="o", ms=4, color=colour)
        for line in _spread(lines):
            # Opposite to the times: an engine that takes less reaches more.
            _write_value(axes, line.batch, _percent(line), f"{_percent(line):.0f} %", colour, -1 if index else 1)
    axes.set_title("Share of the limit, %", loc="left", fontsize=10)
    axes.set_ylim(0, max(130.0, axes.get_ylim()[1] * 1.1))  # with room for values above the points
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.axhline(100, color=_SOFT, linestyle="--", linewidth=1)
    _batch_axis(axes, result)


def _percent(line: Measurement) -> float:
    return 100 * (line.share_of_limit or 0.0)


def _draw_bars(axes: Any, result: BenchResult, name: str) -> None:
    """Draws a bar an engine, for the one batch size that there is."""
    limits = _limits(result, name)
    limit = limits[0].limit if limits else None
    measured = [(run.engine, replace(line, limit=limit)) for run in result.runs for line in _lines(run, name)]
    longest = max([line.median for _, line in measured] + [line.limit or 0.0 for _, line in measured], default=1.0)
    for index, (_, line) in enumerate(measured):
        axes.barh(index, line.median, height=0.62, color=COLOURS[index % len(COLOURS)])
        share = line.share_of_limit
        told = f"{show_figure(line.median)} {line.unit}" + ("" if share is None else f", {share:.0%} of the limit")
        axes.text(line.median + longest * 0.015, index, told, va="center", fontsize=9.5)
    if limit is not None:
        axes.axvline(limit, color=_SOFT, linestyle="--", label=_LIMIT_NAME)
        axes.legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1, 0), borderaxespad=2.2)
    axes.set_yticks(range(len(measured)), [engine for engine, _ in measured])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.62)  # room for what is behind the bars
    batch = measured[0][1].batch if measured else None
    requests = "" if batch is None else f", {batch} request{'s' * (batch != 1)}"
    axes.set_title(f"{_TITLES[name]}{requests}, {_unit(result, name)}", loc="left", fontsize=11)
    _frame(axes, grid_axis="x")


def _batch_axis(axes: Any, result: BenchResult) -> None:
    from matplotlib.ticker import NullLocator

    batches = _batches(result)
    axes.set_xscale("log", base=2)
    shown = _apart(batches)
    axes.set_xticks(shown, [str(batch) for batch in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    _frame(axes, grid_axis="both")


def plain_ticks(axis: Any) -> None:
    """Writes the ticks 1, 2, 5, 10, … out, without powers of ten; more of them where the axis spans little."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    lowest, highest = axis.get_view_interval()
    is_short = highest < 12 * lowest
    axis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0) if is_short else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _frame(axes: Any, grid_axis: str) -> None:
    axes.grid(alpha=0.25, axis=grid_axis)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _write_value(axes: Any, x: float | None, y: float, text: str, colour: str, side: int) -> None:
    """Writes a value beside a point: above it (side 1) or below it (−1)."""
    axes.annotate(
        text,
        (x, y),
        xytext=(0, 8 * side),
        textcoords="offset points",
        ha="center",
        va="bottom" if side > 0 else "top",
        fontsize=8.5,
        color=colour,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
    )


def _spread(lines: Sequence[Measurement]) -> list[Measurement]:
    """The lines of the batch sizes that _apart keeps."""
    kept = _apart([line.batch or 1 for line in lines])
    return [line for line in lines if (line.batch or 1) in kept]


def _apart(batches: Sequence[int]) -> list[int]:
    """The last of ascending sizes and those before it that are far enough apart on a logarithmic axis to be read."""
    kept: list[int] = []
    for batch in reversed(batches):
        if not kept or math.log(kept[-1] / batch) > math.log(batches[-1] / batches[0]) / _MOST_VALUES:
            kept.append(batch)
    return kept[::-1]


def _batches(result: BenchResult) -> list[int]:
    measured = (line for run in result.runs for name in _TITLES for line in _lines(run, name))
    return sorted({line.batch for line in measured if line.batch is not None})


def _limits(result: BenchResult, name: str) -> list[Measurement]:
    """The limits, one line a batch, of the first engine that has it."""
    found: dict[int | None, Measurement] = {}
    for run in result.runs:
        for line in _lines(run, name):
            if line.limit is not None:
                found.setdefault(line.batch, line)
    return sorted(found.values(), key=lambda line: line.batch or 0)


def _unit(result: BenchResult, name: str) -> str:
    return next(line.unit for run in result.runs for line in _lines(run, name))


def _lines(run: EngineRun, name: str) -> list[Measurement]:
    return sorted((line for line in run.measurements if line.name == name), key=lambda line: line.batch or 0)
