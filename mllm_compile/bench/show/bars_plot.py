"""Plots any result as bars: a panel a unit, a bar an engine for each work, the machine's limit as a mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.measure.results import BenchResult
from mllm_compile.bench.show.plot import COLOURS, figure_class
from mllm_compile.bench.show.report import show_figure, work_name

_ROW_INCHES = 0.32


def plot_bars(result: BenchResult, path: Path) -> None:
    """Writes the picture; the file's ending says which format.

    Raises:
        BenchmarkError: matplotlib is not installed, or it cannot write this file.
    """
    try:
        draw_bars(result).savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"--plot {path} cannot be written: {error}") from None


def draw_bars(result: BenchResult) -> Any:
    """The picture as a matplotlib Figure."""
    units = list(dict.fromkeys(line.unit for run in result.runs for line in run.measurements))
    works = {unit: _works(result, unit) for unit in units}
    rows = [max(1, len(works[unit]) * len(result.runs)) for unit in units]
    figure = figure_class()(figsize=(11, 1.6 + _ROW_INCHES * sum(rows)), layout="constrained")
    panels = figure.subplots(max(1, len(units)), 1, squeeze=False, height_ratios=rows or None)
    for (axes,), unit in zip(panels, units, strict=False):
        _draw(axes, result, unit, works[unit])
    device = result.environment.get("device", "?")
    figure.suptitle(f"{result.model}: {result.command} on {device}", fontsize=13, fontweight="bold", x=0.01, ha="left")
    return figure


def _works(result: BenchResult, unit: str) -> list[str]:
    lines = (line for run in result.runs for line in run.measurements if line.unit == unit)
    return list(dict.fromkeys(work_name(line) for line in lines))


def _draw(axes: Any, result: BenchResult, unit: str, works: list[str]) -> None:
    height = 0.8 / max(1, len(result.runs))
    longest = 0.0
    for index, run in enumerate(result.runs):
        for line in run.measurements:
            if line.unit != unit:
                continue
            place = works.index(work_name(line)) + (index - (len(result.runs) - 1) / 2) * height
            label = run.engine if line is next(one for one in run.measurements if one.unit == unit) else None
            axes.barh(place, line.median, height=0.92 * height, color=COLOURS[index % len(COLOURS)], label=label)
            axes.text(line.median, place, f" {show_figure(line.median)}", va="center", fontsize=8.5)
            longest = max(longest, line.median, line.limit or 0.0)
            if line.limit is not None:
                axes.plot([line.limit] * 2, [place - height / 2, place + height / 2], color="black", linewidth=1.5)
    axes.set_yticks(range(len(works)), works, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.15 or 1.0)
    axes.set_title(f"{unit} (black: limit by measured ceilings)", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.grid(alpha=0.25, axis="x")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
