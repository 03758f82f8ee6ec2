"""The table of a server under load."""

from __future__ import annotations

from typing import TextIO

from mllm_compile.bench.serving.load import RateResult, ServeResult
from mllm_compile.process.console import print_table

_COLUMNS = (
    "rate", "answered", "tokens/s", "first p50 ms", "p90", "p99", "gap p50 ms", "p99", "p99.9", "good", "good/s",
)  # fmt: skip


def print_rates(result: ServeResult, stream: TextIO) -> None:
    """Prints a line a rate, and what went wrong."""
    print_table(stream, title_of(result), _COLUMNS, [_row(rate) for rate in result.rates])
    for rate in result.rates:
        for error, count in rate.errors.items():
            print(f"rate {rate_text(rate)}: {count} × {error}", file=stream)


def title_of(result: ServeResult) -> str:
    """The server, and what each request was."""
    work = result.work
    given = f"{work['input_words']} words" if work["input_tokens"] is None else f"{work['input_tokens']} tokens"
    return f"{result.model} at {result.server}: {given} in, {work['output_tokens']} tokens out"


def _row(rate: RateResult) -> tuple[str, ...]:
    return (
        rate_text(rate),
        f"{rate.answered}/{rate.requests}",
        f"{rate.output_tokens_per_second:.1f}",
        *(_ms(rate.ttft, name) for name in ("p50", "p90", "p99")),
        *(_ms(rate.gaps, name) for name in ("p50", "p99", "p99.9")),
        f"{100 * rate.good:.0f} %",
        f"{rate.goodput:.2f}",
    )


def rate_text(rate: RateResult) -> str:
    """A rate as people write it."""
    return "all at once" if rate.rate is None else f"{rate.rate:g}/s"


def _ms(quantiles: dict[str, float], name: str) -> str:
    return f"{quantiles[name] * 1e3:.1f}" if name in quantiles else "-"
