"""Milliseconds of decode steps and of prompts with no, one and several adapters, beside a model compiled without any.

    python -m benchmarks.steps.adapter_speed CONFIG [--requests 1,8,64,256] [--adapters 8] [--prompt 256] [--alone]
                                                    [--kernels]

Needs an NVIDIA GPU that holds the model twice: compiled without adapters, and with them. Both are driven by hand and
take turns in each round: plain is the first one; none, one and several are the second, whose requests have no adapter,
all the same one, or several in turn. Factors are random. Prompts are random tokens, and no prefix is cached. Prints
medians of rounds, and medians of the ratios to plain. With --alone the first model is left out, and ratios are to none.
With --kernels it prints what kernels of all steps take, those first that differ most; steps of each kind are profiled
once.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.script import greedy, need_gpu, parser_of, positive, positives, told_in_one_line
from mllm_compile import EngineConfig, open_model
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.bench.trace.device_events import device_events
from mllm_compile.config.schema import LoraConfig
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.step.runner import StepRunner

_SHOWN, _NAME = 16, 70  # kernels, and characters of a kernel's name


@contextmanager
def runner_of(config: EngineConfig, most: int, length: int, num_adapters: int, rank: int) -> Iterator[ModelRunner]:
    """A runner with room for the requests, and random adapters in all slots."""
    runtime = config.runtime.model_copy(update={"max_running_requests": most, "max_model_len": length})
    lora = LoraConfig(max_adapters=num_adapters, max_rank=rank) if num_adapters else LoraConfig()
    runner = open_model(config.model_copy(update={"runtime": runtime, "lora": lora})).runner
    num_pages = most * -(-length // runner.config.runtime.page_size) + 2
    runner.config = replace(runner.config, num_pages=num_pages)
    runner.initialize()
    if runner.model.lora is not None:
        for buffer in runner.model.lora.pool.buffers.values():
            buffer.normal_(0, 0.02)
    yield runner
    runner.shutdown()


class Turns:
    """Requests of one runner, from their prompts to their ends."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._steps = StepRunner(runner, Sampler(runner.model.sampling))
        runtime = replace(runner.config.runtime, enable_prefix_cache=False)
        config = SchedulerConfig.of(runtime, runner.config.cudagraph, runner.token_to_kv_pool.num_pages)
        self._scheduler = Scheduler(config)

    def run(self, prompts: Sequence[Sequence[int]], slots: Sequence[int], new: int) -> tuple[float, float]:
        """Milliseconds of all prompts, and of a decode step."""
        for index, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
            request = Request(request_id=str(index), prompt_token_ids=list(prompt), params=greedy(new))
            request.adapter_slot = slot
            self._scheduler.add(request)
        started, decoding, num_steps = self._now(), 0.0, 0
        in_flight = None
        while self._scheduler.has_work():
            batch = self._scheduler.schedule()
            if batch is not None and batch.num_decodes == len(prompts):
                if not num_steps:
                    decoding = self._now()
                num_steps += 1
            launched = None if batch is None else (batch, self._steps.submit(batch))
            if in_flight is not None:
                before, handle = in_flight
                output = handle.wait()
                self._scheduler.update(before, output.token_ids, output.broken_rows.tolist(), output.runs)
            in_flight = launched
        ended = self._now()
        if not num_steps:
            raise SystemExit(f"answers of {new} tokens end while others' prompts are computed; set a higher --new")
        return (decoding - started) * 1e3, (ended - decoding) / num_steps * 1e3

    def _now(self) -> float:
        torch.cuda.synchronize(self._runner.device)
        return time.perf_counter()

    def kernels_us(self, prompts: Sequence[Sequence[int]], slots: Sequence[int], new: int) -> Counter[str]:
        """Microseconds of all kernels of the steps, by name."""
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self.run(prompts, slots, new)
        found: Counter[str] = Counter()
        for event in device_events(trace):
            found[event.name[:_NAME]] += event.end - event.start
        return found


def print_kernels(of_kinds: dict[str, Counter[str]]) -> None:
    """Prints a line a kernel, a column a kind."""
    base, *_, last = of_kinds.values()
    names = sorted(last.keys() | base.keys(), key=lambda name: -abs(last[name] - base[name]))
    print("    us of kernels:", ", ".join(f"{kind} {sum(found.values()):.0f}" for kind, found in of_kinds.items()))
    for name in names[:_SHOWN]:
        print("   ", " ".join(f"{found[name]:10.0f}" for found in of_kinds.values()), name)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=positives, default=[1, 8, 64, 256])
    parser.add_argument("--adapters", type=positive, default=8)
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--prompt", type=positive, default=256)
    parser.add_argument("--new", type=positive, default=128)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    need_gpu()
    config, most = EngineConfig.from_yaml(arguments.config), max(arguments.requests)
    length = arguments.prompt + arguments.new + 64
    print(machine_line())
    counts = [arguments.adapters] if arguments.alone else [arguments.adapters, 0]
    with ExitStack() as stack:
        runners = [stack.enter_context(runner_of(config, most, length, one, arguments.rank)) for one in counts]
        stack.enter_context(torch.inference_mode())
        with_adapters, *plain = map(Turns, runners)
        generator = torch.Generator().manual_seed(0)
        for count in arguments.requests:
            prompts = torch.randint(100, 1000, (count, arguments.prompt), generator=generator).tolist()
            kinds = {"plain": (plain[0], [-1] * count)} if plain else {}
            kinds |= {
                "none": (with_adapters, [-1] * count),
                "one": (with_adapters, [0] * count),
                f"{arguments.adapters} mixed": (with_adapters, [i % arguments.adapters for i in range(count)]),
            }
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
            for _ in range(1 + arguments.rounds):
                for name, (turns, slots) in kinds.items():
                    found[name].append(turns.run(prompts, slots, arguments.new))
            base = found[next(iter(kinds))]
            for name, rounds in found.items():
                pairs = list(zip(rounds[1:], base[1:], strict=True))  # the first round warms up
                prompt_ms, step_ms = (statistics.median(ours[place] for ours, _ in pairs) for place in range(2))
                ratios = [
                    statistics.median(ours[place] / of_base[place] for ours, of_base in pairs) for place in range(2)
                ]
                print(
                    f"{count:4} requests, {name:8}: {step_ms:.3f} ms a decode step ({ratios[1]:.3f}), "
                    f"{prompt_ms:.2f} ms for their prompts ({ratios[0]:.3f})",
                )
            if arguments.kernels:
                print_kernels(
                    {name: turns.kernels_us(prompts, slots, arguments.new) for name, (turns, slots) in kinds.items()}
                )


if __name__ == "__main__":
    with told_in_one_line():
        main()
