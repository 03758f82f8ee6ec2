"""Plots a server under load: the first token, the gaps between tokens and tokens a second, by the rate of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.serving.load import RateResult, ServeResult
from mllm_compile.bench.show.plot import COLOURS, figure_class, plain_ticks
from mllm_compile.bench.show.serving import rate_text, title_of

_QUANTILES = ("p50", "p90", "p99")


def plot_rates(result: ServeResult, path: Path) -> None:
    """Writes the picture; the file's ending says which format.

    Raises:
        BenchmarkError: matplotlib is not installed, or it cannot write this file.
    """
    try:
        draw_rates(result).savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"--plot {path} cannot be written: {error}") from None


def draw_rates(result: ServeResult) -> Any:
    """The picture as a matplotlib Figure; a rate that answered nothing has no points."""
    figure = figure_class()(figsize=(8, 9), layout="constrained")
    first, gaps, tokens = figure.subplots(3, 1, sharex=True)
    names = [rate_text(rate) for rate in result.rates]
    _draw_times(first, "first token, ms", names, [rate.ttft for rate in result.rates])
    _draw_times(gaps, "gap between chunks, ms", names, [rate.gaps for rate in result.rates])
    tokens.plot(names, [_answered(rate) for rate in result.rates], marker="o", color=COLOURS[0])
    tokens.set_ylabel("tokens a second")
    tokens.set_ylim(bottom=0)
    tokens.set_xlabel("requests that arrive")
    for axes in (first, gaps, tokens):
        axes.grid(alpha=0.3)
    figure.suptitle(title_of(result))
    return figure


def _draw_times(axes: Any, label: str, names: list[str], times: list[dict[str, float]]) -> None:
    for quantile, colour in zip(_QUANTILES, COLOURS, strict=False):
        axes.plot(names, [_ms(one, quantile) for one in times], marker="o", color=colour, label=quantile)
    axes.set_ylabel(label)
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)
    axes.legend()


def _ms(times: dict[str, float], quantile: str) -> float:
    return times[quantile] * 1e3 if quantile in times else float("nan")


def _answered(rate: RateResult) -> float:
    return rate.output_tokens_per_second if rate.answered else float("nan")
