"""The process that an engine is started and measured in: `python -m benchmarks.figures.worker JOB.json`.

It writes each finding as a line of JSON as soon as it has it, so that nothing is lost when the process is ended.
"""

import time

_FIRST_LINE = time.perf_counter()

import json  # noqa: E402 - the clock starts before anything is imported
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import asdict  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

Message = dict[str, Any]


def probe(job: Message) -> Iterator[Message]:
    """The machine, then the setting and the figures of each model."""
    import torch

    from mllm_compile.bench.limits.ceilings import measure_ceilings
    from mllm_compile.bench.measure.environment import describe_environment
    from mllm_compile.bench.measure.setting import Setting
    from mllm_compile.bench.measure.worker import figures_of
    from mllm_compile.config.resolution.device import is_hopper

    settings = {
        source: Setting.from_config(source, job["largest_batch"], job["longest_request"]) for source in job["sources"]
    }
    first = next(iter(settings.values()))
    device = torch.device(first.device)
    in_fp8 = device.type == "cuda" and is_hopper(first.device)
    ceilings = measure_ceilings(device, getattr(torch, first.dtype), in_fp8)
    yield {"environment": describe_environment(device), "ceilings": asdict(ceilings)}
    for source, setting in settings.items():
        yield {"source": source, "setting": asdict(setting), "figures": asdict(figures_of(setting))}


def engine(job: Message) -> Iterator[Message]:
    """The start until the first token, then the parts of the work that the job names."""
    from mllm_compile.bench.adapters import open_engine
    from mllm_compile.bench.measure.setting import Setting
    from mllm_compile.bench.measure.workloads import START_PROMPT_LEN, Call, random_prompts

    setting = Setting(**job["setting"])
    opened = open_engine(job["engine"], setting)
    ready = time.perf_counter() - _FIRST_LINE
    opened.generate(Call(prompts=random_prompts(1, START_PROMPT_LEN, setting.vocab_size, seed=0), max_tokens=[1]))
    first_token = time.perf_counter() - _FIRST_LINE
    yield {"ready": ready, "first token": first_token, "version": opened.version, "settings": dict(opened.settings)}
    yield from _work(job, opened, setting)
    opened.close()


def _work(job: Message, opened: Any, setting: Any) -> Iterator[Message]:
    from mllm_compile.bench.measure.worker import fits_at_once, timed_calls, with_gpu
    from mllm_compile.bench.measure.workloads import LatencyWork, ThroughputWork

    name = job["engine"]
    latency = LatencyWork(**(job["latency"] | {"batches": tuple(job["latency"]["batches"])}))
    for batch in job["batches"]:
        if not fits_at_once(opened, batch, latency.longest_request):
            yield {"left out": batch}
            continue
        calls = latency.calls(batch, setting.vocab_size)
        prefill, both = timed_calls(opened, calls, latency.repeats, f"{name}: batch {batch}", setting.device)
        lines = latency.measurements(batch, prefill.seconds, both.seconds)
        yield {"lines": [asdict(line) for line in with_gpu(lines, (both, prefill))]}
    throughput = ThroughputWork(**(job["throughput"] | {"mixed_range": tuple(job["throughput"]["mixed_range"])}))
    works = {
        "prompts": (throughput.prefill_call, throughput.prefill_measurement),
        "mixed": (throughput.mixed_call, throughput.mixed_measurement),
    }
    for part in job["parts"]:
        make_call, measurement = works[part]
        call = make_call(setting.vocab_size)
        timed = timed_calls(opened, (call,), throughput.repeats, f"{name}: {part}", setting.device)
        yield {"lines": [asdict(line) for line in with_gpu([measurement(call, timed[0].seconds)], timed)]}


def experts(job: Message) -> Iterator[Message]:
    """The share of a layer's experts that a decode step of each batch chooses."""
    from mllm_compile.bench.measure.setting import Setting
    from mllm_compile.bench.trace.expert_steps import count_experts

    setting = Setting(**job["setting"])
    yield {"shares": count_experts(setting, job["batches"], job["prompt_len"], job["steps"])}


TASKS: dict[str, Callable[[Message], Iterator[Message]]] = {"probe": probe, "engine": engine, "experts": experts}


def main(job_path: str) -> int:
    from mllm_compile.errors import MllmError

    # Whatever else is printed, by engines and their processes, goes to the terminal.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as findings:
        os.dup2(2, 1)
        job = json.loads(Path(job_path).read_text(encoding="utf-8"))
        try:
            for message in TASKS[job["task"]](job):
                print(json.dumps(message), file=findings, flush=True)
            print(json.dumps({"end": True}), file=findings, flush=True)
        except MllmError as error:
            print(json.dumps({"error": str(error)}), file=findings, flush=True)
            return 2
    return 0


if __name__ == "__main__":
    from mllm_compile.process.interruption import ended_by_sigterm

    with ended_by_sigterm():
        code = main(*sys.argv[1:])
    sys.exit(code)
