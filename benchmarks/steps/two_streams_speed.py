"""A long prompt on a stream of its own beside running answers: the gaps between their tokens, and its time.

    python -m benchmarks.steps.two_streams_speed configs/qwen-8b-shape.yaml [--batched 2048 8192]

Needs an NVIDIA GPU with room for the weights twice. One process has two engines, with a model each. One generates
answers on a stream of high priority. The other takes the prompt, in steps of so many tokens on a stream of low
priority. So the GPU runs both steps side by side as it likes. `bench gaps` measures the same work in one engine, whose
steps hold tokens of both and read the weights once for them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.script import need_gpu, parser_of, positive, told_in_one_line
from benchmarks.steps.chunk_steps import Streams
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.measure.gaps import measure_gaps
from mllm_compile.bench.measure.workloads import GapsWork
from mllm_compile.bench.timing.clock import Stopwatch
from mllm_compile.engine.async_engine import AsyncEngine


class Both:
    """Answers from one engine, long prompts from another, as measure_gaps wants them."""

    def __init__(self, answers: Streams, prompts: Streams, long: int) -> None:
        self._answers, self._prompts, self._long = answers, prompts, long

    def stream(self, prompt: list[int], max_tokens: int) -> object:
        return (self._prompts if len(prompt) == self._long else self._answers).stream(prompt, max_tokens)

    async def close(self) -> None:
        """Leaves both open."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--batched", type=positive, nargs="+", default=[2048, 8192], help="tokens of a prompt's step")
    parser.add_argument("--prompt", type=positive, default=32_000)
    parser.add_argument("--decodes", type=positive, default=32)
    args = parser.parse_args()
    need_gpu()
    config = EngineConfig.from_yaml(args.config)
    work = GapsWork(decodes=args.decodes, prompt_len=args.prompt, repeats=1)
    with open_engine(config, work, 0.42, None, priority=-1) as answers:
        for index, batched in enumerate(args.batched):
            watch = Stopwatch()
            with open_engine(config, work, 0.85, batched, priority=0) as prompts:
                print(f"engine {index + 2} in {watch.seconds:.1f} s", file=sys.stderr)
                both = Both(Streams(AsyncEngine(answers)), Streams(AsyncEngine(prompts)), args.prompt)
                lines = work.measurements(measure_gaps(both, work, answers.vocab_size))
            figures = "; ".join(f"{line.name} {line.median:.1f}" for line in lines)
            print(f"steps of {batched} tokens on their own stream: {figures}")


def open_engine(config: EngineConfig, work: GapsWork, fraction: float, batched: int | None, *, priority: int) -> Engine:
    """An engine on a stream of its own, within this share of the memory; what others have taken of it counts."""
    runtime = {"enable_prefix_cache": False, "max_model_len": work.longest_request, "mem_fraction_static": fraction}
    if batched is not None:
        runtime["max_num_batched_tokens"] = batched
    engine = Engine(config.model_copy(update={"runtime": config.runtime.model_copy(update=runtime)}))
    # The engine's own thread runs it between two steps, and launches all that follows there.
    engine.core._call(lambda: torch.cuda.set_stream(torch.cuda.Stream(priority=priority)))
    return engine


if __name__ == "__main__":
    with told_in_one_line():
        main()
