"""`mllm-compile bench roofline`: runs the processes, puts kernels and jobs together, prints the map."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from mllm_compile.bench.limits.roofline import (
    PREPARE,
    SAMPLE,
    UNKNOWN,
    RooflineRow,
    StepFacts,
    assign_jobs,
    jobs_by_name,
    part_times,
    roofline_rows,
)
from mllm_compile.bench.measure.harness import (
    WORKER,
    Probe,
    ceilings_found,
    probe_machine,
    run_process,
    with_enough_experts,
    with_experts,
)
from mllm_compile.bench.measure.results import ActiveExperts, Ceilings
from mllm_compile.bench.measure.setting import RuntimePlace, asked_config
from mllm_compile.bench.measure.workloads import StepWork
from mllm_compile.bench.trace.chrome_trace import TracedKernel
from mllm_compile.config.names import source_name
from mllm_compile.errors import ConfigError
from mllm_compile.process.console import print_table

# Together with the figures they fill 120 columns.
_KERNEL_WIDTH = 34
_LABEL_WIDTH = 30


@dataclass(frozen=True, kw_only=True)
class StepMap:
    """The map of one decode step.

    Attributes:
        batch: its requests.
        wall_us: the step from outside, host work included, no profiler on.
        span_us: from the first kernel's beginning to the last one's end.
        rows: the most time lost first.
        parts: (index in program.steps, µs of its kernels), in the program's order.
        other_us: time of the kernels of no step: inputs made ready, tokens chosen.
        experts: those that the step reads, of a mixture of experts.
    """

    batch: int
    wall_us: float
    span_us: float
    rows: tuple[RooflineRow, ...]
    parts: tuple[tuple[int, float], ...]
    other_us: float
    experts: ActiveExperts | None = None

    @property
    def kernels_us(self) -> float:
        return sum(row.us for row in self.rows)

    @property
    def limit_us(self) -> float:
        return sum(row.limit_us for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The maps of decode steps of several batches.

    Attributes:
        context: tokens of each request.
        with_graphs: the times are of replayed CUDA graphs.
    """

    model: str
    context: int
    with_graphs: bool
    environment: dict[str, str]
    ceilings: Ceilings
    steps: tuple[StepMap, ...]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def run_roofline(source: str, work: StepWork, num_ranks: int | None = None) -> Roofline:
    """Profiles decode steps; on a GPU twice, without CUDA graphs to know each kernel's job, and with them for the time.
    Of several ranks the first one's kernels are shown, beside one device's ceilings.

    Args:
        num_ranks: runtime.tensor_parallel_size; None: the config's.

    Raises:
        BenchmarkError: a process failed; or no batch reads as many experts as it is expected to.
        MllmError: the model, its config or the device cannot be used.
    """
    _check_ranks(source)
    probe = probe_machine(source, work.largest_batch, work.longest_request, num_ranks)
    probe = with_experts(probe, work.batches, work.prompt_len, work.all_steps)
    work = replace(work, batches=with_enough_experts(probe, work.batches))
    ceilings = probe.ceilings.of_one_of(probe.setting.num_ranks)
    known = _trace(probe, work, graphs=False)
    with_graphs = probe.setting.device != "cpu" and _graph_mode(probe) != "none"
    timed = _trace(probe, work, graphs=True) if with_graphs else known
    roofline = Roofline(
        model=source_name(source),
        context=work.context,
        with_graphs=with_graphs,
        environment=probe.environment,
        ceilings=ceilings,
        steps=tuple(
            _step_map(*traces, ceilings, probe.experts_of(traces[0]))
            for traces in zip(work.batches, known["steps"], timed["steps"], strict=True)
        ),
    )
    _remember(roofline, probe, RuntimePlace.from_json(timed["place"]))
    return roofline


def _check_ranks(source: str) -> None:
    """Checks that one rank's kernels are a step's.

    Raises:
        ConfigError: ranks have requests of their own.
    """
    size = asked_config(source).runtime.expert_parallel_size
    if size > 1:
        raise ConfigError(
            f"runtime.expert_parallel_size is {size}: bench roofline shows the kernels of one rank, and each has "
            "requests of its own then. Measure with bench latency, or set it to 1."
        )


def _remember(roofline: Roofline, probe: Probe, place: RuntimePlace) -> None:
    """Stores the result beside the runtime, for its page."""
    steps = [
        {
            "batch": step.batch,
            "context": roofline.context,
            "wall_us": step.wall_us,
            "parts": step.parts,
            "other_us": step.other_us,
            "with_graphs": roofline.with_graphs,
            "date": roofline.environment["date"],
        }
        for step in roofline.steps
    ]
    place.remember({"ceilings": ceilings_found(probe), "decode steps": steps})


def _step_map(
    batch: int, known: dict[str, Any], timed: dict[str, Any], ceilings: Ceilings, experts: ActiveExperts | None
) -> StepMap:
    """
    Args:
        known: a trace that knows its kernels' pieces.
        timed: the trace whose times count; it may be the same.
        experts: those that the step reads, as far as they were counted.
    """
    kernels = known_kernels = [TracedKernel(**kernel) for kernel in known["kernels"]]
    facts = StepFacts.from_json(known["facts"])
    if experts is not None:
        facts = facts.with_expert_share(experts.share)
    jobs = known_jobs = assign_jobs(known_kernels, facts)
    if timed is not known:
        kernels = [TracedKernel(**kernel) for kernel in timed["kernels"]]
        jobs = jobs_by_name(kernels, known_kernels, known_jobs, facts.logits_bytes)
    parts, other_us = part_times(kernels, known_kernels, facts)
    return StepMap(
        batch=batch,
        wall_us=timed["wall_us"],
        span_us=max(kernel.start_us + kernel.us for kernel in kernels) - kernels[0].start_us,
        rows=tuple(roofline_rows(kernels, jobs, ceilings)),
        parts=tuple(sorted(parts.items())),
        other_us=other_us,
        experts=experts,
    )


def print_roofline(roofline: Roofline, top: int, stream: TextIO) -> None:
    """Prints each step's kernels, parts and sums, and a job's times of all steps side by side; 120 columns at most."""
    for step in roofline.steps:
        _print_step(roofline, step, top, stream)
    if len(roofline.steps) > 1:
        title = "µs of all kernels of a job, by the requests of the step"
        print_table(
            stream, title, ("job", *(str(step.batch) for step in roofline.steps)), _side_by_side(roofline.steps)
        )
    print(
        f"limits at {roofline.ceilings.read_bytes_s / 1e9:.4g} GB/s and "
        f"{roofline.ceilings.flops_s / 1e12:.3g} TFLOP/s"
        + ("" if (fp8 := roofline.ceilings.fp8_flops_s) is None else f", in fp8 {fp8 / 1e12:.4g}")
        + ", measured",
        file=stream,
    )
    print(", ".join(f"{name} {value}" for name, value in roofline.environment.items()), file=stream)


def _print_step(roofline: Roofline, step: StepMap, top: int, stream: TextIO) -> None:
    times = "a replayed CUDA graph" if roofline.with_graphs else "no CUDA graph"
    title = f"{roofline.model}, batch {step.batch}, context {roofline.context}, {times}: kernels by time lost"
    columns = ("lost µs", "µs", "n", "MB", "GB/s", "share", "job", "kernel")
    shown = step.rows[:top]
    print_table(stream, title, columns, [_cells(row) for row in shown])
    if len(shown) < len(step.rows):
        print(f"  and {len(step.rows) - len(shown)} more rows; --top shows more of them", file=stream)
    print_table(stream, "parts of the step", ("part", "lost µs", "µs", "n", "MB", "share"), _parts(step.rows))
    idle = step.span_us - step.kernels_us
    print(
        f"step {step.wall_us:.0f} µs from outside (steps not overlapped), {step.span_us:.0f} from its first kernel to "
        f"its last under the profiler:\nkernels {step.kernels_us:.0f}, nothing between them {max(0.0, idle):.0f}; "
        f"limit {step.limit_us:.0f} µs" + ("" if step.experts is None else f"; it reads {step.experts}"),
        file=stream,
    )


def _side_by_side(steps: Sequence[StepMap]) -> list[tuple[str, ...]]:
    """Each job's time in every step; first the job with the longest time in all steps together."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    for index, step in enumerate(steps):
        for row in step.rows:
            sums[row.label][index] += row.us
    longest_first = sorted(sums.items(), key=lambda item: -sum(item[1]))
    return [(_cut(label, _LABEL_WIDTH), *(f"{us:.1f}" for us in times)) for label, times in longest_first]


def _trace(probe: Probe, work: StepWork, *, graphs: bool) -> dict[str, Any]:
    """The result of worker.roofline."""
    setting = probe.setting if graphs else probe.setting.without_graphs()
    job = {"task": "roofline", "setting": asdict(setting), "work": asdict(work), "ranges": not graphs}
    return run_process(WORKER, job)


def _graph_mode(probe: Probe) -> str:
    return probe.setting.engine_config().cudagraph.mode


def _cells(row: RooflineRow) -> tuple[str, ...]:
    return (*_figures(row.lost_us, row.us, row.count, row.num_bytes), _rate(row), _share(row), *_names(row))


def _figures(lost_us: float, us: float, count: int, num_bytes: int) -> tuple[str, ...]:
    # Padded, since a kernel that beats the ceiling (in a cache) loses less than nothing, and its sign is no digit.
    return f"{lost_us:8.1f}", f"{us:8.1f}", str(count), f"{num_bytes / 1e6:.2f}"


def _rate(row: RooflineRow) -> str:
    return f"{row.num_bytes / row.us / 1e3:.0f}" if row.us else "0"


def _share(row: RooflineRow) -> str:
    return f"{row.share:.0%}"


def _names(row: RooflineRow) -> tuple[str, str]:
    return _cut(row.label, _LABEL_WIDTH), _cut(row.kernel, _KERNEL_WIDTH)


def _cut(name: str, width: int) -> str:
    """Cuts the middle of a name: its beginning says what it is, its end which one."""
    return name if len(name) <= width else f"{name[: width - 13]}…{name[-12:]}"


def _parts(rows: Sequence[RooflineRow]) -> list[tuple[str, ...]]:
    sums: dict[str, list[RooflineRow]] = defaultdict(list)
    for row in rows:
        sums[_part(row)].append(row)
    table = []
    for part, group in sorted(sums.items(), key=lambda item: -sum(row.lost_us for row in item[1])):
        us, limit_us = sum(row.us for row in group), sum(row.limit_us for row in group)
        figures = _figures(us - limit_us, us, sum(row.count for row in group), sum(row.num_bytes for row in group))
        table.append((part, *figures, f"{limit_us / us:.0%}" if us else ""))
    return table


def _part(row: RooflineRow) -> str:
    if row.label in (PREPARE, SAMPLE, UNKNOWN):
        return row.label
    if row.flops:
        return "GEMMs"
    what = row.label.partition(" ")[0]
    return what if what in ("attention", "state") else "between GEMMs"
