"""Measures what each switch brings: the latency work with all of them, without one after another, and without any.

A switch is a pass that can be left out, a part that `runtime.without` names, or a kind of graphs. Each variant is a
compiled runtime and a process of its own; those that are not compiled yet are compiled side by side, before any of
them is measured. The complete variant is measured first and last: the distance between the two shows the noise.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any, TextIO

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.measure.harness import compile_ahead, measure_latency, probe_machine, switches_at_work
from mllm_compile.bench.measure.results import BenchResult, EngineRun, Measurement
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.measure.workloads import LatencyWork
from mllm_compile.bench.show.report import Table, markdown_row, provenance, show_figure, work_name
from mllm_compile.config.names import source_name
from mllm_compile.errors import ConfigError
from mllm_compile.process.console import print_table
from mllm_compile.runtime.config_sections import SWITCHES

# Kind of graphs → the key of `cudagraph`, its value that switches them off, and the values of an engine without them.
GRAPHS: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "full_graphs": ("mode", "piecewise", ("piecewise", "none")),
    "mixed_graphs": ("mixed_tokens", (), ([],)),
}
# Switches whose kernels a runtime may turn out to lack.
_IN_RUNTIME = ("sample_in_graph", "copy_prefix", "divide_prefix")
COMMAND = "ablation"
ALL, ALL_AGAIN, NONE = "all", "all, again", "without any of them"


def switch_names() -> list[str]:
    """All switches: the optional passes in their order, the switches of `runtime.without`, and GRAPHS."""
    from mllm_compile.passes.pipeline import optional_pass_names

    return [*optional_pass_names(), *SWITCHES, *GRAPHS]


def run_ablation(source: str, switches: Sequence[str], work: LatencyWork) -> BenchResult:
    """tpot and prefill of every variant, with the limits of this machine; a run is named after its variant.

    A switch that the engine with all of them does without, as its config says or the device or model wants it, or that
    changes nothing in its runtime, has no variant, nor has one that it cannot do without: stderr says so.

    Args:
        switches: some of switch_names().

    Raises:
        ConfigError: a switch is not known.
        BenchmarkError: the engine with all switches failed.
        MllmError: the model, its config or the device cannot be used.
    """
    unknown = [name for name in switches if name not in switch_names()]
    if unknown:
        raise ConfigError(f"--switch {unknown[0]!r} is not known; expected some of {', '.join(switch_names())}")
    probe = probe_machine(source, work.largest_batch, work.longest_request)

    def measure(name: str, left_out: Sequence[str]) -> EngineRun:
        _tell(f"{name}:")
        run = measure_latency("mllm", without(probe.setting, left_out), work, probe)
        return replace(run, engine=name)

    runs, switches_left_out = [measure(ALL, ())], []
    at_work = switches_at_work(probe.setting)
    for switch in [switch for switch in switches if not _is_on(runs[0], switch, at_work)]:
        _tell(f"without {switch}: skipped, as this engine does without it already")
    tried = [switch for switch in switches if _is_on(runs[0], switch, at_work)]
    variants = [[switch] for switch in tried] + ([tried] if len(tried) > 1 else [])
    faults = compile_ahead([without(probe.setting, left_out) for left_out in variants])
    for switch, fault in zip(tried, faults, strict=False):
        if fault is not None:
            _tell(f"without {switch}: {fault}")
            continue
        try:
            runs.append(measure(f"without {switch}", (switch,)))
        except BenchmarkError as error:
            _tell(f"without {switch}: {error}")
        else:
            switches_left_out.append(switch)
    if len(switches_left_out) > 1:
        runs.append(measure(NONE, switches_left_out))
    runs.append(measure(ALL_AGAIN, ()))
    return BenchResult(
        command=COMMAND,
        work=asdict(work),
        model=source_name(source),
        environment=probe.environment,
        ceilings=probe.ceilings,
        runs=tuple(runs),
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _is_on(run: EngineRun, switch: str, at_work: Collection[str]) -> bool:
    """True if the engine of a run had it."""
    if switch in GRAPHS:
        key, _, without_it = GRAPHS[switch]
        return run.settings["cudagraph"][key] not in without_it
    if switch not in SWITCHES or switch in _IN_RUNTIME:
        is_there = switch in at_work
    else:  # the resolved config says under its name whether it serves
        is_there = any(run.settings[section].get(switch, False) for section in ("compile", "cudagraph"))
    return is_there and switch not in run.settings["runtime"]["without"]


def without(setting: Setting, switches: Sequence[str]) -> Setting:
    """The setting with these switches switched off, beside what its config leaves out already."""
    config = setting.engine_config()
    of_runtime = [name for name in switches if name in SWITCHES]
    passes = [name for name in switches if name not in SWITCHES and name not in GRAPHS]
    if passes:
        left_out = (*config.compile.disable_passes, *passes)
        setting = setting.changed("compile", disable_passes=tuple(dict.fromkeys(left_out)))
    if of_runtime:
        setting = setting.changed("runtime", without=tuple(dict.fromkeys((*config.runtime.without, *of_runtime))))
    for key, value, _ in (GRAPHS[name] for name in switches if name in GRAPHS):
        setting = setting.changed("cudagraph", **{key: value})
    return setting


def print_ablation(result: BenchResult, stream: TextIO) -> None:
    """A row a variant, each figure with its change against all switches."""
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
    columns = ("switches", *(f"{work_name(line)}, {line.unit}" for line in first.measurements))
    return columns, [(run.engine, *_cells(run, first)) for run in result.runs]


def _provenance(result: BenchResult) -> list[str]:
    """The note on where it was taken; one engine is behind all variants."""
    return provenance(replace(result, runs=(replace(result.runs[0], engine="mllm"),)))


def _cells(run: EngineRun, first: EngineRun) -> list[str]:
    if run is first:
        return [show_figure(line.median) for line in run.measurements]
    complete = {line.key: line for line in first.measurements}
    return [_cell(line, complete[line.key]) for line in run.measurements]


def _cell(line: Measurement, complete: Measurement) -> str:
    return f"{show_figure(line.median)} ({line.median / complete.median - 1:+.1%})"
