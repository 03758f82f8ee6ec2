"""Microseconds of each kernel of a step, in order, of a model cut to a few layers: what one layer of each kind costs.

    python -m benchmarks.steps.layers_speed configs/qwen3_5-text-shape.yaml --layers linear_attention linear_attention
        [--batches 1 8 64 256] [--prompts 32x2048] [--tensor-parallel-size 2] [--vocabulary 16384]

The weights are random, the vocabulary is small, and `--layers` are kinds of layers as the model's config.json names
them, or the number of layers: a model of one kind compiles no kernels of the others. Steps of decodes are shown kernel
by kernel, steps of prompts by the sum of each kernel's times. Of several ranks they are rank 0's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import greedy, mistake, parser_of, positive, told_in_one_line
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.measure.workloads import StepWork, random_prompts
from mllm_compile.bench.timing.clock import Stopwatch
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.bench.trace.chrome_trace import STEP_RANGE, TracedKernel, read_steps, short_name
from mllm_compile.bench.trace.step_trace import trace_step
from mllm_compile.config.folders.model_folder import open_model_folder
from mllm_compile.config.schema import EngineConfig
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.engine.start.parts import EngineParts
from mllm_compile.process.progress import reporter_for
from mllm_compile.runtime.schedule.request import Request

VOCABULARY = 16384
KINDS = ("layer_types", "layers_block_type")  # keys of config.json that list kinds of layers
CONTEXT = 300  # tokens of a request that decodes
STEPS = 10
LONGEST_NAME = 90


def prompts_of(text: str) -> tuple[int, int]:
    """COUNTxLENGTH, for argparse."""
    count, _, length = text.partition("x")
    return positive(count), positive(length)


@contextmanager
def cut_config(path: Path, layers: Sequence[str], vocabulary: int, num_ranks: int) -> Iterator[Path]:
    """A config of the same model with these layers alone."""
    config = EngineConfig.from_yaml(path)
    shape = json.loads((open_model_folder(config.model).path / "config.json").read_text(encoding="utf-8"))
    keys = [key for key in KINDS if key in shape]
    if len(layers) == 1 and layers[0].isdecimal():
        count = positive(layers[0])
        shape |= {key: shape[key][:count] for key in keys}
    elif not keys:
        mistake(
            f"{config.model.path} lists no kinds of layers (it has none of {', '.join(KINDS)}); give --layers a number"
        )
    elif unknown := sorted(set(layers) - set(shape[keys[0]])):
        mistake(f"--layers: the model has no {unknown[0]}, only {', '.join(sorted(set(shape[keys[0]])))}")
    else:
        count = len(layers)
        shape[keys[0]] = list(layers)
    shape["vocab_size"] = vocabulary
    if "num_hidden_layers" in shape:
        shape["num_hidden_layers"] = count
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        sections = config.model_dump()
        sections["model"] |= {"path": folder, "load_format": "dummy"}
        sections["runtime"]["tensor_parallel_size"] = num_ranks
        written = Path(folder) / "config.yaml"
        written.write_text(json.dumps(sections), encoding="utf-8")
        yield written


def show_decodes(parts: EngineParts, setting: Setting, batch: int) -> None:
    work = StepWork(batches=(batch,), context=CONTEXT, steps=STEPS)
    found = trace_step(parts, setting, work, batch, ranges=False)
    kernels = [TracedKernel(**kernel) for kernel in found["kernels"]]
    first, last = kernels[0].start_us, max(kernel.start_us + kernel.us for kernel in kernels)
    busy = sum(kernel.us for kernel in kernels)
    print(f"{batch} decodes: {found['wall_us']:.0f} µs from outside, {last - first:.0f} of kernels, {busy:.0f} busy")
    for kernel in kernels:
        print(f"  {kernel.start_us - first:9.1f} {kernel.us:8.1f} {short_name(kernel.name)[:LONGEST_NAME]}")


def show_prompts(parts: EngineParts, setting: Setting, count: int, length: int) -> None:
    params = greedy(1)

    def run() -> int:
        """Computes the prompts; returns how many steps they took."""
        for index, prompt in enumerate(random_prompts(count, length, setting.vocab_size, seed=1)):
            parts.scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, params=params))
        steps = 0
        while (planned := parts.scheduler.schedule()) is not None:
            with torch.profiler.record_function(STEP_RANGE):
                output = parts.step_runner.submit(planned).wait()
            parts.scheduler.update(planned, output.token_ids)
            steps += 1
        return steps

    run()
    watch = Stopwatch()
    steps = run()
    taken = watch.seconds
    print(f"{count} prompts of {length}: {taken * 1e3:.1f} ms in {steps} steps, {count * length / taken:.0f} tokens/s")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu := setting.device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    sums: dict[str, list[float]] = defaultdict(list)
    for kernels in read_steps(_trace_of(profiler), on_gpu):
        for kernel in kernels:
            sums[short_name(kernel.name)].append(kernel.us)
    for name, times in sorted(sums.items(), key=lambda item: -sum(item[1])):
        print(f"  {sum(times):9.1f} {len(times):5} {name[:LONGEST_NAME]}")


def _trace_of(profiler: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--layers", nargs="+", required=True, help="kinds of layers, in order, or their number")
    parser.add_argument("--batches", nargs="+", type=positive, default=[1, 8, 64, 256], help="requests that decode")
    parser.add_argument("--prompts", type=prompts_of, default=(32, 2048), help="COUNTxLENGTH (default: 32x2048)")
    parser.add_argument("--tensor-parallel-size", type=positive, default=1, help="GPUs")
    parser.add_argument("--vocabulary", type=positive, default=VOCABULARY)
    args = parser.parse_args()
    count, length = args.prompts
    with cut_config(args.config, args.layers, args.vocabulary, args.tensor_parallel_size) as config:
        longest = max(length + 1, CONTEXT + 4 * STEPS)
        setting = Setting.from_config(str(config), max(*args.batches, count), longest)
        watch = Stopwatch()
        parts = assemble(setting.engine_config(), reporter_for(plain_lines=True))
        print(f"{machine_line(setting.device)}, ready in {watch.seconds:.1f} s")
        try:
            for batch in args.batches:
                show_decodes(parts, setting, batch)
                sys.stdout.flush()
            show_prompts(parts, setting, count, length)
        finally:
            parts.shutdown()
    return 0


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main())
