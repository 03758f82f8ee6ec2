"""What each lever brings: the latency work with all of them, without one after another, and without any.

A lever is a pass that can be left out, or a choice of the config that can be switched off. Each variant is a compiled
runtime and a process of its own. What is complete is measured first and last: how far the two are apart says what a
difference between variants is worth.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from mllm_compile.bench.harness import measure_latency, probe_machine
from mllm_compile.bench.report import Table, markdown_row, provenance, show_figure, work_name
from mllm_compile.bench.results import BenchResult, EngineRun, Measurement
from mllm_compile.bench.setting import Setting
from mllm_compile.bench.workloads import LatencyWork
from mllm_compile.console import print_table
from mllm_compile.errors import ConfigError

# Name → section, key and value that switch it off. The passes come before them.
CHOICES = {
    "hopper_decode": ("compile", "hopper_decode", False),
    "split_decode": ("compile", "split_decode", False),
    "full_graphs": ("cudagraph", "mode", "piecewise"),
}
COMMAND = "ablation"
ALL, ALL_AGAIN, NONE = "all", "all, again", "none"


def lever_names() -> list[str]:
    """All levers: the optional passes in their order, then CHOICES."""
    from mllm_compile.passes.pipeline import optional_pass_names

    return [*optional_pass_names(), *CHOICES]


def run_ablation(config: Path, levers: Sequence[str], work: LatencyWork) -> BenchResult:
    """tpot and prefill of every variant, with the limits of this machine; a run is named after its variant.

    Args:
        levers: some of lever_names().

    Raises:
        ConfigError: a lever is not known.
        BenchmarkError: a variant's process failed.
        MllmError: the config, the model or the device cannot be used.
    """
    unknown = [name for name in levers if name not in lever_names()]
    if unknown:
        raise ConfigError(f"--lever {unknown[0]!r} is not known; expected some of {', '.join(lever_names())}")
    probe = probe_machine(config, work.largest_batch, work.longest_request)
    variants: dict[str, Sequence[str]] = {ALL: ()}
    variants |= {f"without {lever}": (lever,) for lever in levers}
    variants |= {NONE: levers} if len(levers) > 1 else {}
    variants |= {ALL_AGAIN: ()}
    runs = []
    for name, left_out in variants.items():
        print(f"{name}:", file=sys.stderr, flush=True)
        run = measure_latency("mllm", without(probe.setting, left_out), work, probe)
        runs.append(replace(run, engine=name))
    return BenchResult(
        command=COMMAND,
        work=asdict(work),
        model=config.stem,
        environment=probe.environment,
        ceilings=probe.ceilings,
        runs=tuple(runs),
    )


def without(setting: Setting, levers: Sequence[str]) -> Setting:
    """The setting with these levers switched off, beside what its config leaves out already."""
    passes = [name for name in levers if name not in CHOICES]
    if passes:
        left_out = setting.engine_config().compile.disable_passes
        setting = setting.changed("compile", disable_passes=tuple(dict.fromkeys((*left_out, *passes))))
    for name in levers:
        if name in CHOICES:
            section, key, value = CHOICES[name]
            setting = setting.changed(section, **{key: value})
    return setting


def print_ablation(result: BenchResult, stream: TextIO) -> None:
    """A row a variant, each figure with its change against all levers."""
    print_table(stream, f"{result.command}: {result.model}", *ablation_table(result))
    for line in _provenance(result):
        print(line, file=stream)


def ablation_markdown(result: BenchResult) -> str:
    """The same as Markdown."""
    columns, rows = ablation_table(result)
    lines = [f"### {result.model}: {result.command}", "", markdown_row(columns)]
    lines += [markdown_row(["---", *["---:"] * (len(columns) - 1)]), *map(markdown_row, rows)]
    return "\n".join([*lines, "", "; ".join(_provenance(result)), ""])


def ablation_table(result: BenchResult) -> Table:
    """(columns, rows): works beside each other, variants under each other."""
    first = result.runs[0]
    columns = ("levers", *(f"{work_name(line)}, {line.unit}" for line in first.measurements))
    return columns, [(run.engine, *_cells(run, first)) for run in result.runs]


def _provenance(result: BenchResult) -> list[str]:
    """One engine is behind all variants."""
    return provenance(replace(result, runs=(replace(result.runs[0], engine="mllm"),)))


def _cells(run: EngineRun, first: EngineRun) -> list[str]:
    if run is first:
        return [show_figure(line.median) for line in run.measurements]
    complete = {line.key: line for line in first.measurements}
    return [_cell(line, complete[line.key]) for line in run.measurements]


def _cell(line: Measurement, complete: Measurement) -> str:
    return f"{show_figure(line.median)} ({line.median / complete.median - 1:+.1%})"
