"""Prints results as tables: for a terminal, and as Markdown for the pages on performance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from mllm_compile.bench.measure.results import BenchResult, Measurement
from mllm_compile.bench.measure.workloads import first_token_of
from mllm_compile.errors import ConfigError
from mllm_compile.process.console import print_table

MOST_SPREAD = 0.10  # of samples of one figure; more is told
_LEAST_EXPLAINED = 0.5  # of a difference between processes, for the clocks to be its reason
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def print_result(result: BenchResult, stream: TextIO) -> None:
    """Prints a table with a row for each line of the work and engine, and where it was taken."""
    print_table(stream, f"{result.command}: {result.model}", *result_table(result))
    for line in (*gpu_text(result), *beside_text(result), *doubts(result), *provenance(result)):
        print(line, file=stream)


def gpu_text(result: BenchResult) -> list[str]:
    """The GPU's clock and power while each line of a run was measured, where they were read."""
    lines = []
    for run in result.runs:
        states = [f"{work_name(line)} at {' and '.join(map(str, line.gpu))}" for line in run.measurements if line.gpu]
        if states:
            lines.append(f"{run.engine}, the GPU: {'; '.join(states)}")
    return lines


def beside_text(result: BenchResult) -> list[str]:
    """How long new images take beside their limit at the rate that text of the same length reaches in the same run; of
    `bench images` alone."""
    lines = []
    for run in result.runs:
        shares = {line.key: line.share_of_limit for line in run.measurements}
        for (name, batch), share in shares.items():
            of_text = shares.get((first_token_of("text"), batch))
            if name == first_token_of("new images") and share and of_text:
                lines.append(
                    f"{run.engine}: new images at batch {batch} take {of_text / share:.2f} times as long as their "
                    "operations would at the rate of the text's prefill"
                )
    return lines


def doubts(result: BenchResult) -> list[str]:
    """The lines on figures that say little: samples or processes that are far apart, and more than a limit allows."""
    lines = []
    for run in result.runs:
        for line in run.measurements:
            name = f"{run.engine}, {work_name(line)}"
            if line.spread_of_processes > MOST_SPREAD:
                each = " and ".join(map(show_figure, line.processes))
                lines.append(
                    f"{name}: processes differ by {line.spread_of_processes:.0%} ({each} {line.unit}): {_why(line)}"
                )
            elif line.spread > MOST_SPREAD:
                least, most = show_figure(min(line.samples)), show_figure(max(line.samples))
                lines.append(
                    f"{name}: samples differ by {line.spread:.0%} ({least} to {most} {line.unit}), so the median says "
                    "little. Measure again with nothing else on the machine, or with more --repeats"
                )
            if (share := line.share_of_limit) is not None and share > 1 + MOST_SPREAD:
                lines.append(
                    f"{name}: {share:.0%} of a limit cannot be: the machine was slower while its rates were measured, "
                    "or the data fitted in its caches. Do not compare with the limit"
                )
    return lines


def _why(line: Measurement) -> str:
    """The reason why processes differ: the GPU's clocks, as far as they were read, or else the processes themselves."""
    own = "a process keeps what it began with. `bench roofline` shows where the time of each goes"
    if len(line.gpu) != len(line.processes):
        return own
    clocks = " and ".join(f"{state.clock_mhz:.0f}" for state in line.gpu)
    if (share := clocks_explain(line)) < _LEAST_EXPLAINED:
        return f"the GPU's clocks ({clocks} MHz) explain {share:.0%} of that, so {own}"
    reasons = list(dict.fromkeys(reason for state in line.gpu for reason in state.slowed_by))
    held = f", held down by {' and '.join(reasons)}" if reasons else ""
    return f"the GPU's clocks ({clocks} MHz{held}) explain {share:.0%} of that. Measure again with the clocks alike"


def clocks_explain(line: Measurement) -> float:
    """The share of the difference between the slowest and the fastest process that their GPUs' clocks account for.

    All of it where the times are as the clocks are; at most 1, and 0 where the slower process had the higher clock.
    """
    pairs = sorted(zip(line.processes, line.gpu, strict=True), key=lambda pair: pair[0])
    (least, of_least), (most, of_most) = pairs[0], pairs[-1]
    fast, slow = (of_most, of_least) if line.unit.startswith("tok/s") else (of_least, of_most)
    by_clock, by_time = fast.clock_mhz / slow.clock_mhz - 1, most / least - 1
    return min(1.0, max(0.0, by_clock / by_time)) if by_time else 0.0


def result_table(result: BenchResult) -> Table:
    """(columns, rows): the work first, engines under each other."""
    has_limit = any(line.limit is not None for run in result.runs for line in run.measurements)
    columns = ("work", "engine", "median", "unit", "spread") + (("limit", "share of limit") if has_limit else ())
    rows = []
    for key in _in_order(line.key for run in result.runs for line in run.measurements):
        for run in result.runs:
            for line in run.measurements:
                if line.key == key:
                    rows.append((work_name(line), run.engine, *_figures(line, has_limit)))
    return columns, rows


def _in_order(keys: Iterable[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
    """Each once: works in the order in which they first come, the batches of each under each other."""
    seen = list(dict.fromkeys(keys))
    names = list(dict.fromkeys(name for name, _ in seen))
    return sorted(seen, key=lambda key: names.index(key[0]))


def work_name(line: Measurement) -> str:
    return line.name if line.batch is None else f"{line.name} b={line.batch}"


def _figures(line: Measurement, has_limit: bool) -> tuple[str, ...]:
    figures = (show_figure(line.median), line.unit, "-" if len(line.samples) == 1 else f"{line.spread:.1%}")
    if not has_limit:
        return figures
    share = line.share_of_limit
    if line.limit is None or share is None:
        return (*figures, "", "")
    return (*figures, show_figure(line.limit), f"{share:.0%}")


def show_figure(value: float) -> str:
    """Three significant digits at least, thousands with commas."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def provenance(result: BenchResult) -> list[str]:
    """The versions, commit, machine and ceilings, without which a figure is not one."""
    engines = ", ".join(f"{run.engine} {run.version}" for run in result.runs)
    lines = [f"{engines}: " + ", ".join(f"{name} {value}" for name, value in result.environment.items())]
    if result.ceilings is not None:
        lines.append(
            f"measured ceilings: read {result.ceilings.read_bytes_s / 1e9:,.4g} GB/s, "
            f"GEMM {result.ceilings.flops_s / 1e12:,.3g} TFLOP/s"
            + ("" if (fp8 := result.ceilings.fp8_flops_s) is None else f", in fp8 {fp8 / 1e12:,.4g}")
        )
    if result.experts:
        lines.append(f"read by a decode step: {', '.join(map(str, result.experts))}")
    return lines


def markdown(results: Sequence[BenchResult]) -> str:
    """One Markdown table for each model, command and device, engines side by side, with where it was taken below.

    Results of the same are joined: several engines, or several batches, may come from several runs.

    Raises:
        ConfigError: two results have the same engine's figure of the same work.
    """
    groups: dict[str, list[BenchResult]] = {}
    for result in results:
        title = f"{result.model}: {result.command} on {result.environment['device']}"
        groups.setdefault(title, []).append(result)
    return "\n".join(_markdown_group(title, group) for title, group in groups.items())


def _markdown_group(title: str, group: list[BenchResult]) -> str:
    cells: dict[tuple[str, int | None], dict[str, Measurement]] = {}
    for result in group:
        for run in result.runs:
            for line in run.measurements:
                if run.engine in cells.setdefault(line.key, {}):
                    raise ConfigError(f"{title}: two results have {run.engine}'s {work_name(line)}. Give one of them.")
                cells[line.key][run.engine] = line
    engines = list(dict.fromkeys(run.engine for result in group for run in result.runs))
    limited = [engine for engine in engines if any(_share(line_of.get(engine)) for line_of in cells.values())]
    header = ["work", "unit", "limit", *engines, *(f"{engine}, share of limit" for engine in limited)]
    rule = ["---", "---", *["---:"] * (len(header) - 2)]
    lines = [f"### {title}", "", markdown_row(header), markdown_row(rule)]
    for key in _in_order(cells):
        by_engine = cells[key]
        line = next(iter(by_engine.values()))
        limit = by_engine.get(engines[0], line).limit
        figures = [_cell(by_engine.get(engine)) for engine in engines]
        shares = [_share(by_engine.get(engine)) for engine in limited]
        shown = "" if limit is None else show_figure(limit)
        lines.append(markdown_row([work_name(line), line.unit, shown, *figures, *shares]))
    for source in dict.fromkeys("; ".join(provenance(result)) for result in group):
        lines += ["", source]
    return "\n".join([*lines, ""])


def _cell(line: Measurement | None) -> str:
    """The median and the samples' distance to either side, which one sample does not have."""
    if line is None:
        return ""
    median = show_figure(line.median)
    return median if len(line.samples) == 1 else f"{median} ±{line.spread / 2:.1%}"


def _share(line: Measurement | None) -> str:
    return "" if line is None or line.share_of_limit is None else f"{line.share_of_limit:.0%}"


def markdown_row(cells: Sequence[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"
