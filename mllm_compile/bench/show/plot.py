"""Latency against batch size, one line an engine, the machine's limit below them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mllm_compile.bench.errors import BenchmarkError
from mllm_compile.bench.measure.results import BenchResult, EngineRun, Measurement


def check_picture(path: Path) -> None:
    """Before anything is measured for a picture that cannot be drawn.

    Raises:
        BenchmarkError: matplotlib is not installed, or does not write files with this ending.
    """
    known = sorted(_figure_class()().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise BenchmarkError(f"--plot {path}: expected a file that ends in one of {', '.join(known)}")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchmarkError("--plot needs matplotlib: pip install 'mllm-compile[bench]'") from None
    return Figure


def plot_latency(result: BenchResult, path: Path) -> None:
    """Writes a picture of `tpot` and `prefill`; the file's ending says which format.

    Raises:
        BenchmarkError: matplotlib is not installed, or it cannot write this file.
    """
    figure = _figure_class()(figsize=(11, 4.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("tpot", "prefill"), strict=True):
        _plot_line(axes, result, name)
    figure.suptitle(f"{result.model} on {result.environment.get('device', '?')}")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"--plot {path} cannot be written: {error}") from None


def _plot_line(axes: Any, result: BenchResult, name: str) -> None:
    for run in result.runs:
        lines = _lines(run, name)
        medians = [line.median for line in lines]
        below = [median - min(line.samples) for line, median in zip(lines, medians, strict=True)]
        above = [max(line.samples) - median for line, median in zip(lines, medians, strict=True)]
        errors = [[max(0.0, value) for value in side] for side in (below, above)]
        axes.errorbar([line.batch for line in lines], medians, yerr=errors, marker="o", capsize=3, label=run.engine)
    limits = [line for line in _lines(result.runs[0], name) if line.limit is not None]
    axes.plot([line.batch for line in limits], [line.limit for line in limits], "k--", label="limit: measured ceilings")
    batches = sorted({line.batch for run in result.runs for line in _lines(run, name) if line.batch is not None})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("requests in the batch")
    axes.set_ylabel(f"{name}, ms")
    axes.grid(alpha=0.3, which="both")
    axes.legend()


def _lines(run: EngineRun, name: str) -> list[Measurement]:
    return [line for line in run.measurements if line.name == name]
