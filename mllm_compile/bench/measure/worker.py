"""The fresh process that one thing is measured in: `python -m mllm_compile.bench.measure.worker JOB.json RESULT.json`.

An engine gets a process of its own, so that neither memory nor a warmed-up library of another one helps or hurts it.
The job and the result are plain JSON; what an engine says goes to the terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.adapters import open_engine, open_images, open_streams
from mllm_compile.bench.adapters.base import BenchEngine
from mllm_compile.bench.limits.limits import ModelFigures
from mllm_compile.bench.measure.gaps import measure_gaps
from mllm_compile.bench.measure.images import features_a_side, measure_images
from mllm_compile.bench.measure.results import EngineRun, Measurement
from mllm_compile.bench.measure.setting import Setting, asked_config, runtime_place
from mllm_compile.bench.measure.workloads import (
    Call,
    GapsWork,
    ImagesWork,
    LatencyWork,
    LongWork,
    StepWork,
    ThroughputWork,
)
from mllm_compile.bench.timing.clock import wall_seconds
from mllm_compile.bench.timing.gpu_meter import GpuMeter, GpuState, Nvml, Span
from mllm_compile.bench.timing.rounds import by_turns
from mllm_compile.errors import MllmError
from mllm_compile.process.interruption import ended_by_sigterm
from mllm_compile.process.progress import reporter_for

if TYPE_CHECKING:
    from mllm_compile.passes.base import WeightSchemes

EXIT_MISTAKE = 2


def device(job: dict[str, Any]) -> dict[str, Any]:
    """Say which kind of device an engine of the config would use."""
    from mllm_compile.config.resolution.device import detect_device

    return {"is_cpu": not detect_device(asked_config(job["config"]).runtime.device).is_cuda}


def probe(job: dict[str, Any]) -> dict[str, Any]:
    """The setting, the model's figures, the environment and (unless they are not wanted) the ceilings."""
    longest = job["longest_request"]
    if job.get("image_side") is not None:
        from mllm_compile.config.folders.model_folder import open_model_folder

        asked = asked_config(job["config"])
        folder = open_model_folder(asked.model, asked.cache.dir).path
        longest += features_a_side(str(folder), job["image_side"]) ** 2
    setting = Setting.from_config(job["config"], job["largest_batch"], longest, job.get("tensor_parallel_size"))

    import torch

    from mllm_compile.bench.limits.ceilings import measure_ceilings
    from mllm_compile.bench.measure.environment import describe_environment
    from mllm_compile.config.resolution.device import is_hopper

    device, dtype = torch.device(setting.device), getattr(torch, setting.dtype)
    result: dict[str, Any] = {"setting": asdict(setting), "environment": describe_environment(device)}
    if job["ceilings"]:
        figures = figures_of(setting)
        result["figures"] = asdict(figures)
        in_fp8 = figures.fp8_params > 0 and device.type == "cuda" and is_hopper(setting.device)
        result["ceilings"] = asdict(measure_ceilings(device, dtype, in_fp8).of_devices(setting.num_ranks))
    return result


def figures_of(setting: Setting) -> ModelFigures:
    """The figures of the setting's model, with the weights and the KV cache in the types that it serves them in."""
    from mllm_compile.bench.limits.model_figures import model_figures

    runtime = setting.engine_config().runtime
    types = runtime.state_dtype, 1 if runtime.kv_cache_dtype == "fp8_e4m3" else None
    schemes = _weight_schemes(setting)
    return model_figures(Path(setting.model_folder), setting.dtype, setting.trust_remote_code, schemes, *types)


def _weight_schemes(setting: Setting) -> WeightSchemes | None:
    """The weights that our engine has in few bits; None: it has none."""
    if setting.quantization in ("none", "dequantize") and setting.lm_head_quantization == "none":
        return None
    from mllm_compile.compiler.lowering import build_model
    from mllm_compile.compiler.target import find_target
    from mllm_compile.process.progress import NullReporter

    target = find_target(setting.engine_config())
    return build_model(target.config, target.model, NullReporter()).weight_schemes


def latency(job: dict[str, Any]) -> dict[str, Any]:
    """An EngineRun of tpot and prefill by batch, and where the runtime is that it ran."""
    work = LatencyWork(**(job["work"] | {"batches": tuple(job["work"]["batches"])}))
    setting = Setting(**job["setting"])
    engine = open_engine(job["engine"], setting)
    lines: list[Measurement] = []
    for index, batch in enumerate(work.batches):
        if not fits_at_once(engine, batch, work.longest_request):
            _say(f"{job['engine']}: left out, as requests would wait for the KV cache", batch)
            continue
        first, whole = work.calls(batch, setting.vocab_size)
        left = f"{job['engine']}: batch {batch}, {index + 1} of {len(work.batches)}"
        prefill, both = timed_calls(engine, (first, whole), work.repeats, left, setting.device)
        lines += with_gpu(work.measurements(batch, prefill.seconds, both.seconds), (both, prefill))
        _say(f"{job['engine']}: " + ", ".join(f"{line.name} {line.median:.2f} ms" for line in lines[-2:]), batch)
    run = _run(job["engine"], engine, _some(lines))
    return run | {"place": asdict(runtime_place(setting)) if job["engine"] == "mllm" else None}


def throughput(job: dict[str, Any]) -> dict[str, Any]:
    """An EngineRun of mixed and prefill throughput."""
    work = ThroughputWork(**(job["work"] | {"mixed_range": tuple(job["work"]["mixed_range"])}))
    setting = Setting(**job["setting"])
    engine = open_engine(job["engine"], setting)
    prefill_call, mixed_call = work.prefill_call(setting.vocab_size), work.mixed_call(setting.vocab_size)
    lines = []
    for call, measure in ((prefill_call, work.prefill_measurement), (mixed_call, work.mixed_measurement)):
        name = f"{job['engine']}: {len(call.prompts)} requests"
        timed = timed_calls(engine, (call,), work.repeats, name, setting.device)
        lines += with_gpu([measure(call, timed[0].seconds)], timed)
        _say(f"{job['engine']}: {lines[-1].name} {lines[-1].median:.0f} {lines[-1].unit}")
    return _run(job["engine"], engine, lines)


def long(job: dict[str, Any]) -> dict[str, Any]:
    """An EngineRun of tpot and prefill with long contexts."""
    points = tuple((count, length) for count, length in job["work"]["points"])
    work = LongWork(**(job["work"] | {"points": points}))
    setting = Setting(**job["setting"])
    engine = open_engine(job["engine"], setting)
    lines: list[Measurement] = []
    for index, point in enumerate(points):
        count, length = point
        name = f"{job['engine']}: {count} x {length}"
        if not fits_at_once(engine, count, length + work.output_len):
            _say(f"{name}: left out, as requests would wait for the KV cache")
            continue
        calls = work.latency(point).calls(count, setting.vocab_size)
        left = f"{name}, {index + 1} of {len(points)}"
        prefill, both = timed_calls(engine, calls, work.repeats, left, setting.device)
        lines += with_gpu(work.measurements(point, prefill.seconds, both.seconds), (both, prefill))
        _say(f"{name}: " + ", ".join(f"{line.name} {line.median:.2f} {line.unit}" for line in lines[-2:]))
    return _run(job["engine"], engine, _some(lines))


def gaps(job: dict[str, Any]) -> dict[str, Any]:
    """An EngineRun of gaps beside a long prompt."""
    work, setting = GapsWork(**job["work"]), Setting(**job["setting"])
    engine = open_streams(job["engine"], setting)
    lines = work.measurements(measure_gaps(engine, work, setting.vocab_size))
    for line in lines:
        _say(f"{job['engine']}: {line.name} {line.median:.2f} {line.unit}")
    return asdict(
        EngineRun(engine=job["engine"], version=engine.version, settings=engine.settings, measurements=tuple(lines))
    )


def images(job: dict[str, Any]) -> dict[str, Any]:
    """An EngineRun of prompts with images, and the tokens of each."""
    work = ImagesWork(**(job["work"] | {"batches": tuple(job["work"]["batches"])}))
    setting = Setting(**job["setting"])
    engine = open_images(job["engine"], setting)
    prompt_len = engine.num_features(work.side) + work.text_len
    lines: list[Measurement] = []
    for index, batch in enumerate(work.batches):
        if not fits_at_once(engine, batch, prompt_len + work.output_len):
            _say(f"{job['engine']}: left out, as requests would wait for the KV cache", batch)
            continue
        left = f"{job['engine']}: batch {batch}, {index + 1} of {len(work.batches)}"
        own = work.measurements(batch, measure_images(engine, work, batch, setting.vocab_size, left))
        _say(f"{job['engine']}: " + ", ".join(f"{line.name} {line.median:.2f} ms" for line in own), batch)
        lines += own
    return _run(job["engine"], engine, _some(lines)) | {"prompt_len": prompt_len}


def _some(lines: list[Measurement]) -> list[Measurement]:
    """
    Raises:
        BenchmarkError: it has no such steps.
    """
    if not lines:
        raise BenchmarkError("the KV cache holds none of the batches at once: give smaller ones, or shorter prompts")
    return lines


def fits_at_once(engine: BenchEngine, batch: int, request_len: int) -> bool:
    """True if so many requests hold their KV at once, as far as the engine tells."""
    return engine.kv_tokens is None or batch * request_len <= engine.kv_tokens


def roofline(job: dict[str, Any]) -> dict[str, Any]:
    """The kernels of a step of each batch (roofline.py), and where the runtime is that made them."""
    from mllm_compile.bench.trace.step_trace import trace_steps

    setting = Setting(**job["setting"])
    steps = trace_steps(setting, StepWork(**job["work"]), job["ranges"])
    return {"steps": steps, "place": asdict(runtime_place(setting))}


def experts(job: dict[str, Any]) -> dict[str, Any]:
    """The share of a layer's experts that a decode step of each batch chooses (expert_steps.py)."""
    from mllm_compile.bench.trace.expert_steps import count_experts

    setting = Setting(**job["setting"])
    return {"shares": count_experts(setting, job["batches"], job["prompt_len"], job["steps"])}


def compile_runtime(job: dict[str, Any]) -> dict[str, Any]:
    """Compile the runtime of a setting, if none is there."""
    from mllm_compile.compiler.load_or_compile import load_or_compile

    load_or_compile(Setting(**job["setting"]).engine_config(), reporter_for(plain_lines=True))
    return {}


def switches(job: dict[str, Any]) -> dict[str, Any]:
    """Passes and kernels that changed something in the setting's compiled runtime, by the names that ablation has."""
    from mllm_compile.compiler.target import find_target
    from mllm_compile.config.resolution.device import detect_device
    from mllm_compile.store.artifact import open_artifact

    target = find_target(Setting(**job["setting"]).engine_config())
    artifact = open_artifact(target.folder)
    at_work = [report["name"] for report in artifact.manifest.about["passes"] if report["matches"]]
    if artifact.program.decode_loop is not None:
        at_work.append("sample_in_graph")
    runtime = target.config.runtime
    if runtime.attention_backend == "flashinfer" and detect_device(runtime.device).is_hopper:
        at_work += ["copy_prefix", "divide_prefix"]
    return {"switches": at_work}


_TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "device": device,
    "probe": probe,
    "latency": latency,
    "throughput": throughput,
    "long": long,
    "gaps": gaps,
    "images": images,
    "roofline": roofline,
    "experts": experts,
    "compile": compile_runtime,
    "switches": switches,
}


@dataclass(frozen=True)
class TimedCall:
    """The seconds of each repeat of a call, and the GPU's state meanwhile; None without a GPU."""

    seconds: list[float]
    gpu: GpuState | None


def timed_calls(engine: BenchEngine, calls: tuple[Call, ...], repeats: int, name: str, device: str) -> list[TimedCall]:
    """Times each call `repeats` times after one warm-up; the calls take turns, so that drift hits all alike.

    Args:
        name: shown beside what is left, between the calls.
        device: the engine's, whose clock and power are read.
    """
    meter = GpuMeter(Nvml.of(device))
    spans: list[list[Span]] = [[] for _ in calls]
    with reporter_for(plain_lines=True).stage(name, total=len(calls) * (1 + repeats)) as stage:

        def take(index: int) -> float:
            with meter.watching() as span:
                seconds = wall_seconds(lambda: engine.generate(calls[index]))
            spans[index].append(span)
            stage.advance()
            return seconds

        seconds = by_turns({index: partial(take, index) for index in range(len(calls))}, repeats)
    return [TimedCall(seconds[index], meter.state(watched[1:])) for index, watched in enumerate(spans)]


def with_gpu(lines: list[Measurement], calls: Sequence[TimedCall]) -> list[Measurement]:
    """The same lines, each with the GPU's state in its call."""
    return [
        line if call.gpu is None else replace(line, gpu=(call.gpu,)) for line, call in zip(lines, calls, strict=True)
    ]


def _run(name: str, engine: BenchEngine, lines: list[Measurement]) -> dict[str, Any]:
    run = EngineRun(engine=name, version=engine.version, settings=engine.settings, measurements=tuple(lines))
    engine.close()
    return asdict(run)


def _say(text: str, batch: int | None = None) -> None:
    print(text if batch is None else f"{text} at batch {batch}", file=sys.stderr, flush=True)


def main(job_path: str, result_path: str) -> int:
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    try:
        result = _TASKS[job["task"]](job)
    except MllmError as error:
        result = {"error": str(error)}
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    return EXIT_MISTAKE if "error" in result else 0


if __name__ == "__main__":
    with ended_by_sigterm():
        code = main(*sys.argv[1:])
    sys.exit(code)
