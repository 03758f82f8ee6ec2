"""Starts a fresh process for each measurement and collects what it writes. Imports no torch: it only waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.adapters import check_images, check_installed, check_streams
from mllm_compile.bench.limits.limits import (
    ModelFigures,
    with_gaps_limits,
    with_images_limits,
    with_latency_limits,
    with_long_limits,
    with_throughput_limits,
)
from mllm_compile.bench.measure.child import run_children
from mllm_compile.bench.measure.results import (
    ActiveExperts,
    BenchResult,
    Ceilings,
    EngineRun,
    Measurement,
    joined,
    run_from_json,
)
from mllm_compile.bench.measure.setting import RuntimePlace, Setting
from mllm_compile.bench.measure.workloads import (
    START_PROMPT_LEN,
    GapsWork,
    ImagesWork,
    LatencyWork,
    LongWork,
    StartupWork,
    ThroughputWork,
)
from mllm_compile.config.names import source_name
from mllm_compile.files.cache_folders import CACHE_VARIABLE
from mllm_compile.process import child_python
from mllm_compile.runtime.files.json_data import from_json

WORKER = "mllm_compile.bench.measure.worker"
FIRST_TOKENS = "mllm_compile.bench.measure.first_tokens"
# As many as a compile keeps busy in the mean: tracing takes one, compiling pieces all there are.
_PROCESSORS_OF_A_COMPILE = 4


@dataclass(frozen=True)
class Probe:
    """The findings of a first process."""

    setting: Setting
    environment: dict[str, str]
    ceilings: Ceilings
    figures: ModelFigures
    experts: tuple[ActiveExperts, ...] = ()  # of the counted batches

    def experts_of(self, batch: int) -> ActiveExperts | None:
        return next((one for one in self.experts if one.batch == batch), None)


def serves_on_cpu(source: str) -> bool:
    """Say whether the model would be served on a CPU. A process of its own finds out, as that takes torch.

    Raises:
        MllmError: the model, its config or the device cannot be used.
    """
    return bool(run_process(WORKER, {"task": "device", "config": source})["is_cpu"])


def run_latency(
    source: str, engines: Sequence[str], work: LatencyWork, num_ranks: int | None = None, num_processes: int = 1
) -> BenchResult:
    """tpot and prefill of each engine, in processes of its own, with the limits of this machine.

    Raises:
        BenchmarkError: an engine is not installed or failed.
        MllmError: the model, its config or the device cannot be used.
    """
    _check_engines(engines)
    probe, work = probe_latency(source, work, num_ranks)
    runs = [
        joined([measure_latency(engine, probe.setting, work, probe) for _ in range(num_processes)])
        for engine in engines
    ]
    result = _result("latency", asdict(work), source, probe.environment, probe.ceilings, runs)
    return replace(result, experts=probe.experts)


def probe_latency(source: str, work: LatencyWork, num_ranks: int | None = None) -> tuple[Probe, LatencyWork]:
    """Like probe_machine; of a mixture of experts, also those that decode steps choose. The work is returned without
    batches that would be no result.

    Raises:
        BenchmarkError: no batch is left.
    """
    probe = probe_machine(source, work.largest_batch, work.longest_request, num_ranks)
    probe = with_experts(probe, work.batches, work.input_len, work.output_len - 1)
    return probe, replace(work, batches=with_enough_experts(probe, work.batches))


def with_experts(probe: Probe, batches: Sequence[int], prompt_len: int, steps: int) -> Probe:
    """The same with the experts that decode steps behind such prompts choose, where the model is a mixture of them."""
    if probe.figures.num_experts == 1:
        return probe
    job = {"task": "experts", "setting": asdict(probe.setting), "batches": list(batches)}
    shares = run_process(WORKER, job | {"prompt_len": prompt_len, "steps": steps})["shares"]
    return replace(probe, experts=counted_experts(probe.figures, batches, shares))


def counted_experts(
    figures: ModelFigures, batches: Sequence[int], shares: Sequence[float | None]
) -> tuple[ActiveExperts, ...]:
    """The experts of a layer that a step of each batch chooses.

    Args:
        shares: as count_experts gives them.
    """
    return tuple(
        ActiveExperts(
            batch=batch,
            num_experts=figures.num_experts,
            touched=share * figures.num_experts,
            expected=figures.expected_experts(batch),
        )
        for batch, share in zip(batches, shares, strict=True)
        if share is not None
    )


def with_enough_experts(probe: Probe, batches: Sequence[int]) -> tuple[int, ...]:
    """The batches whose time is a result. With random weights tokens may choose fewer experts than a model's, which is
    quicker. A checkpoint's router chooses as it does.

    Raises:
        BenchmarkError: none of them.
    """
    few = [one for one in probe.experts if probe.setting.random_weights and not one.are_enough]
    for one in few:
        print(f"batch {one.batch} is left out: it reads {one}, and would be too quick", file=sys.stderr, flush=True)
    left = tuple(batch for batch in batches if batch not in [one.batch for one in few])
    if not left:
        raise BenchmarkError(
            f"with these random weights a step reads too few experts to stand for the model: {', '.join(map(str, few))}"
            "; less than 95 % of the expected ones is no result. Measure a checkpoint, or other batches."
        )
    return left


def measure_latency(engine: str, setting: Setting, work: LatencyWork, probe: Probe) -> EngineRun:
    """The latency work by one engine, in a process of its own; our own engine's is kept beside its runtime."""
    found = _worker_run("latency", engine, setting, asdict(work))
    place, run = found.pop("place"), run_from_json(found)
    lines = with_latency_limits(run.measurements, work, probe.figures, probe.ceilings, probe.experts)
    run = _with_lines(run, lines)
    if place is not None:
        _remember(RuntimePlace.from_json(place), run, work, probe)
    return run


def _remember(place: RuntimePlace, run: EngineRun, work: LatencyWork, probe: Probe) -> None:
    steps = [[line.batch, line.median] for line in run.measurements if line.name == "tpot"]
    latency = {"input_len": work.input_len, "output_len": work.output_len, "date": probe.environment["date"]}
    place.remember({"ceilings": ceilings_found(probe), "latency": {**latency, "tpot_ms": steps}})


def ceilings_found(probe: Probe) -> dict[str, Any]:
    """The ceilings with where and when they were measured, as they are kept beside a runtime."""
    return {**asdict(probe.ceilings), **{name: probe.environment[name] for name in ("device", "date")}}


def switches_at_work(setting: Setting) -> frozenset[str]:
    """Passes and kernels that changed something in the runtime that was compiled for a setting."""
    return frozenset(run_process(WORKER, {"task": "switches", "setting": asdict(setting)})["switches"])


def compile_ahead(settings: Sequence[Setting]) -> list[str | None]:
    """Compiles what several settings need, side by side as far as there are processors.

    Returns:
        Of each why it cannot be compiled; None: it is.
    """

    at_once = max(1, (os.cpu_count() or 1) // _PROCESSORS_OF_A_COMPILE)
    jobs = [{"task": "compile", "setting": asdict(setting)} for setting in settings]
    return [result.get("error") for result in _run_processes(WORKER, jobs, at_once=at_once)]


def run_throughput(
    source: str, engines: Sequence[str], work: ThroughputWork, num_ranks: int | None = None
) -> BenchResult:
    """Like run_latency, for mixed and prefill throughput."""
    _check_engines(engines)
    probe = probe_machine(source, work.largest_batch, work.longest_request, num_ranks)
    return _run_each("throughput", source, engines, work, probe, with_throughput_limits)


def run_long(source: str, engines: Sequence[str], work: LongWork) -> BenchResult:
    """Like run_latency, for long contexts."""
    _check_engines(engines)
    probe = probe_machine(source, work.largest_batch, work.longest_request)
    return _run_each("long", source, engines, work, probe, with_long_limits)


def run_gaps(source: str, engines: Sequence[str], work: GapsWork) -> BenchResult:
    """Like run_latency, for gaps beside a long prompt.

    Raises:
        BenchmarkError: also if an engine takes no requests while others run.
    """
    _check_engines(engines, check_streams)
    probe = probe_machine(source, work.largest_batch, work.longest_request)
    return _run_each("gaps", source, engines, work, probe, with_gaps_limits)


def run_images(source: str, engines: Sequence[str], work: ImagesWork) -> BenchResult:
    """Like run_latency, for prompts with images.

    Raises:
        BenchmarkError: also if an engine or the model takes no images.
    """
    _check_engines(engines, check_images)
    probe = probe_machine(source, work.largest_batch, work.text_len + work.output_len, image_side=work.side)
    return _run_each("images", source, engines, work, probe, with_images_limits, "prompt_len")


def _run_each(
    command: str,
    source: str,
    engines: Sequence[str],
    work: ThroughputWork | LongWork | GapsWork | ImagesWork,
    probe: Probe,
    with_limits: Callable[..., list[Measurement]],
    *found_too: str,
) -> BenchResult:
    """The work by each engine in its own process, with limits.

    Args:
        command: the name of the benchmark, and of the worker's task.
        with_limits: of limits.py.
        found_too: findings of the worker beside the measurements, which `with_limits` is told by these names.
    """
    runs = []
    for engine in engines:
        found = _worker_run(command, engine, probe.setting, asdict(work))
        more = {name: found.pop(name) for name in found_too}
        run = run_from_json(found)
        runs.append(_with_lines(run, with_limits(run.measurements, work, probe.figures, probe.ceilings, **more)))
    return _result(command, asdict(work), source, probe.environment, probe.ceilings, runs)


def run_startup(source: str, engines: Sequence[str], work: StartupWork) -> BenchResult:
    """Cold and warm starts of each engine; every start is a process of its own, every cold one has empty caches."""
    _check_engines(engines)
    job = {"task": "probe", "config": source, "largest_batch": 1, "longest_request": START_PROMPT_LEN + 1}
    found = run_process(WORKER, job | {"ceilings": False})
    setting = Setting(**found["setting"])
    runs = [_startup_run(engine, setting, work.repeats) for engine in engines]
    return _result("startup", asdict(work), source, found["environment"], None, runs)


def probe_machine(
    source: str, largest_batch: int, longest_request: int, num_ranks: int | None = None, image_side: int | None = None
) -> Probe:
    """Resolves the config for a work and measures the device's ceilings, in a process that leaves nothing behind.

    Args:
        num_ranks: runtime.tensor_parallel_size; None: the config's.
        image_side: pixels of a side of the image that the longest request has beside its tokens; None: it has none.
    """
    job = {
        "task": "probe",
        "config": source,
        "largest_batch": largest_batch,
        "longest_request": longest_request,
        "tensor_parallel_size": num_ranks,
        "image_side": image_side,
        "ceilings": True,
    }
    found = run_process(WORKER, job)
    return Probe(
        Setting(**found["setting"]),
        found["environment"],
        Ceilings(**found["ceilings"]),
        from_json(ModelFigures, found["figures"]),
    )


def run_process(module: str, job: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs `python -m module JOB RESULT` and returns its result. Its output goes to stderr.

    Raises:
        BenchmarkError: it failed; the message is its own where it gave one.
    """
    (result,) = _run_processes(module, [job], environment)
    if "error" in result:
        raise BenchmarkError(result["error"])
    return result


def _run_processes(
    module: str,
    jobs: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str] | None = None,
    at_once: int = 1,
) -> list[dict[str, Any]]:
    """The result of each job's process, or {"error": reason}; so many of them run side by side."""
    with tempfile.TemporaryDirectory(prefix="mllm-bench-") as scratch:
        places = [
            (Path(scratch) / f"job-{index}.json", Path(scratch) / f"result-{index}.json") for index in range(len(jobs))
        ]
        for job, (job_path, _) in zip(jobs, places, strict=True):
            job_path.write_text(json.dumps(job), encoding="utf-8")
        codes = run_children(
            [child_python.command(module, *map(str, paths)) for paths in places],
            sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
            child_python.environment() | dict(environment or {}),
            at_once,
        )
        results = []
        for job, code, (_, result_path) in zip(jobs, codes, places, strict=True):
            if result_path.exists():
                results.append(json.loads(result_path.read_text(encoding="utf-8")))
            else:
                what = " ".join(str(job[key]) for key in ("task", "engine") if key in job)
                error = f"the process for {what or module} ended with code {code}; see its output"
                results.append({"error": error})
    return results


def cache_environment(folder: Path) -> dict[str, str]:
    """Sends all caches (ours, torch's, Triton's, vLLM's, the driver's) into a folder. FlashInfer's kernels count as
    installed."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "CUDA_CACHE_PATH": str(folder / "driver"),
        CACHE_VARIABLE: str(folder / "mllm_compile"),
    }


def _startup_run(engine: str, setting: Setting, repeats: int) -> EngineRun:
    names = ("cold", "warm")
    starts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="mllm-bench-caches-") as folder:
            fresh = setting.changed("cache", dir=str(Path(folder) / "mllm_compile"))
            job = {"engine": engine, "setting": asdict(fresh)}
            for name in names:
                starts[name].append(run_process(FIRST_TOKENS, job, cache_environment(Path(folder))))
                print(f"{engine}: start {name} {starts[name][-1]['first token']:.2f} s", file=sys.stderr, flush=True)
    lines = [
        Measurement.of(f"{label} {name}", "s", [start[key] for start in starts[name]])
        for name in names
        for label, key in (("start", "first token"), ("ready", "ready"))
    ]
    lines += [
        Measurement.of(f"{name}: {part}", "s", [start["parts"][part] for start in starts[name]])
        for name in names
        for part in starts[name][0]["parts"]
    ]
    first = starts["cold"][0]
    return EngineRun(engine=engine, version=first["version"], settings=first["settings"], measurements=tuple(lines))


def _worker_run(task: str, engine: str, setting: Setting, work: dict[str, Any]) -> dict[str, Any]:
    return run_process(WORKER, {"task": task, "engine": engine, "setting": asdict(setting), "work": work})


def _with_lines(run: EngineRun, lines: Sequence[Measurement]) -> EngineRun:
    return EngineRun(engine=run.engine, version=run.version, settings=run.settings, measurements=tuple(lines))


def _result(
    command: str,
    work: dict[str, Any],
    source: str,
    environment: dict[str, str],
    ceilings: Ceilings | None,
    runs: list[EngineRun],
) -> BenchResult:
    return BenchResult(
        command=command,
        work=work,
        model=source_name(source),
        environment=environment,
        ceilings=ceilings,
        runs=tuple(runs),
    )


def _check_engines(engines: Sequence[str], *checks: Callable[[str], None]) -> None:
    for check in (check_installed, *checks):
        for engine in engines:
            check(engine)


def _has_descriptor(stream: Any) -> bool:
    """True if the stream has a descriptor: a test may have replaced it by one in memory."""
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True
