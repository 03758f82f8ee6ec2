"""Experts that a layer reads in verify steps and in plain decodes, counted from the routes.

    python -m benchmarks.steps.verify_experts CONFIG [--requests 1,8,32] [--drafted 3] [--prompt 512] [--steps 16]

Of a mixture of experts, on any device. An engine counts, and nothing is timed: its pieces run as traced, no graphs.
(verify_speed times steps of the same shape.) Its roundings are others, so single tokens may choose otherwise, and the
mean does not. Prompts are random tokens and cached before. N-grams are drafted at full length, and half of a draft is
accepted. A plain decode is the last step of a request, which has no draft. Beside each count is what independent
routes would read: random weights come near to it, and a trained model reads fewer experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.script import greedy, parser_of, positive, positives, told_in_one_line
from benchmarks.steps.verify_speed import config_of
from mllm_compile import EngineConfig
from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.trace.decode_steps import model_runner
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.engine.start.parts import EngineParts
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch

PAGE_SIZE = 64


class Read(NamedTuple):
    """Experts that the steps of a batch read.

    Attributes:
        experts: of a layer, the mean of all layers and steps.
        independent: the mean if each row chose as many experts independently of all others.
    """

    experts: float
    independent: float


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=positives, default=[1, 8, 32])
    parser.add_argument("--drafted", type=positive, default=3)
    parser.add_argument("--prompt", type=positive, default=512)
    parser.add_argument("--steps", type=positive, default=16, help="of each kind; plain ones have new prompts each")
    args = parser.parse_args()
    width = 1 + args.drafted
    most_tokens = args.prompt + tokens_of(width, args.steps)
    parts = counting_engine(EngineConfig.from_yaml(args.config), args.drafted, max(args.requests), most_tokens)
    try:
        print("requests | rows | experts of a layer that are read | independently")
        for count in args.requests:
            sets = [prompts_of(count, args.prompt, seed) for seed in range(args.steps)]
            plain = [read(parts, prompts, 1, 1) for prompts in sets]
            verify = read(parts, sets[0], width, args.steps)
            for rows, (experts, independent) in (
                (count, [statistics.fmean(values) for values in zip(*plain, strict=True)]),
                (count * width, verify),
            ):
                print(f"{count:4} | {rows:4} | {experts:6.1f} | {independent:6.1f}")
    finally:
        parts.shutdown()


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    return torch.randint(100, 1000, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens_of(width: int, num_steps: int) -> int:
    """Tokens of an answer that has so many steps of `width` rows, or more."""
    return 2 if width == 1 else width * (num_steps + 2)


def counting_engine(config: EngineConfig, drafted: int, most: int, most_tokens: int) -> EngineParts:
    """Parts of an engine that counts the choices of experts, with room for so many requests at once."""
    asked = config_of(config, drafted, 1 + drafted / 2, most, most_tokens)
    sections = {
        "runtime": asked.runtime.model_copy(update={"expert_stats": True, "page_size": PAGE_SIZE}),
        "compile": asked.compile.model_copy(update={"backend": "eager"}),
        "cudagraph": type(asked.cudagraph)(mode="none"),
    }
    num_pages = 1 + 2 * most * (most_tokens // PAGE_SIZE + 2)
    return assemble(asked.model_copy(update=sections), NullReporter(), num_pages=num_pages)


def read(parts: EngineParts, prompts: Sequence[list[int]], width: int, num_steps: int) -> Read:
    """Experts that so many steps read in which each prompt's answer has `width` rows.

    Raises:
        BenchmarkError: the answers end before.
    """
    requests_of(parts, prompts, 1)
    while step(parts) is not None:
        pass  # the prompts are cached now, so that all of them are in one step
    counts: list[torch.Tensor] = list(model_runner(parts).expert_counts.values())
    requests = requests_of(parts, prompts, tokens_of(width, num_steps))
    found: list[torch.Tensor] = []
    while len(found) < num_steps:
        for of_layer in counts:
            of_layer.zero_()
        batch = step(parts)
        if batch is None:
            raise BenchmarkError(f"the answers ended behind {len(found)} of {num_steps} steps of {width} rows each")
        if batch.num_decodes == len(requests) and (batch.num_new == width).all():
            found.append(torch.stack(counts).cpu())
    for request in requests:
        parts.scheduler.abort(request)
    num_rows, num_experts = len(requests) * width, len(counts[0])
    of_row = float(torch.stack(found).sum()) / (num_rows * len(found) * len(counts))
    mean = statistics.fmean(float((one > 0).sum(dim=1).float().mean()) for one in found)
    return Read(mean, num_experts * (1 - (1 - of_row / num_experts) ** num_rows))


def requests_of(parts: EngineParts, prompts: Sequence[list[int]], max_tokens: int) -> list[Request]:
    """Requests of these prompts, which are given to the scheduler."""
    requests = [
        Request(request_id=str(index), prompt_token_ids=prompt, params=greedy(max_tokens))
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        parts.scheduler.add(request)
    return requests


def step(parts: EngineParts) -> ScheduledBatch | None:
    """Runs a step to its end. None: nothing is left to run."""
    batch = parts.scheduler.schedule()
    if batch is not None:
        output = parts.step_runner.submit(batch).wait()
        parts.scheduler.update(batch, output.token_ids, output.broken_rows.tolist(), output.runs)
    return batch


if __name__ == "__main__":
    with told_in_one_line():
        main()
