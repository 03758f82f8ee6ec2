"""How much sooner replies of some kinds come with drafts by suffixes: a model recites them, in an engine's own steps.

    python -m benchmarks.replies REPLIES.json.xz
    python -m benchmarks.steps.recited_drafts configs/qwen-8b-shape.yaml REPLIES.json.xz [--requests 1,8,32]
        [--kinds files,edits] [--drafts none,7,auto] [--rounds 3]

The first command writes prompts and replies of each kind (benchmarks/replies/kinds.py). The model's weights recite what
the last tokens of a prompt say in ids of their own (benchmarks/replies/reciter.py), so each reply is what it has to be.
Prompts are cached before. So many requests are answered at once: where one is over the next begins, until none is left
to begin. Milliseconds are until then, for each token of one of them on average. Replies are remembered; those of the
kind `again` alone are asked for twice, and the second time counts. The script ends where a reply is
another one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.replies.kinds import ANSWERED_BEFORE, KINDS, Known, read
from benchmarks.replies.reciter import reciting_weights, script_of
from benchmarks.script import existing_file, greedy, names_of, parser_of, positive, positives, told_in_one_line
from mllm_compile import Engine, EngineConfig, EngineStats
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.errors import WeightUpdateError
from mllm_compile.process.progress import NullReporter

PAGE_SIZE = 64
SUFFIX = {"method": "suffix"}
DRAFTS = {"none": {"method": "none"}, "7": SUFFIX | {"num_speculative_tokens": 7}, "auto": SUFFIX}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("replies", type=existing_file)
    parser.add_argument("--requests", type=positives, default=[1, 8, 32])
    parser.add_argument("--kinds", type=names_of(KINDS), default=[*KINDS])
    parser.add_argument(
        "--drafts", type=names_of(DRAFTS), default=[*DRAFTS], help="the first is what others are beside"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="replies in the place of each request at once")
    args = parser.parse_args()
    replies = {kind: known for kind, known in read(args.replies).items() if kind in args.kinds}
    config = EngineConfig.from_yaml(args.config)
    if torch.cuda.is_available():
        print(machine_line())
    print(
        "drafts | kind | requests | ms a token | times the first's | tokens a step and request | drafts, tokens a draft"
    )
    first: dict[tuple[str, int], float] = {}
    for drafts in args.drafts:
        asked = config_of(config, DRAFTS[drafts], max(args.requests), replies)
        with engine_of(asked, script_length(replies), args.rounds) as engine:
            for kind, known in replies.items():
                for count in args.requests:
                    if len(known) < count:
                        print(f"{drafts} | {kind} | {count} | there are {len(known)} replies")
                        continue
                    newest = known[-args.rounds * count :]
                    recited = Recited(engine, newest, script_length(replies), f"{kind} {count}")
                    if kind in ANSWERED_BEFORE:
                        recited.answer(count)
                    token_ms, told = recited.answer(count)
                    times = token_ms / first.setdefault((kind, count), token_ms)
                    print(f"{drafts} | {kind} | {count} | {token_ms:.3f} | {times:.3f} | {told}")


def script_length(replies: dict[str, list[Known]]) -> int:
    """Tokens of each prompt's script, and most of a reply."""
    return max(len(one.reply) for known in replies.values() for one in known)


def config_of(
    config: EngineConfig, speculative: dict[str, Any], most: int, replies: dict[str, list[Known]]
) -> EngineConfig:
    longest = max(len(one.prompt) for known in replies.values() for one in known) + 2 * script_length(replies)
    sections = config.model_dump(exclude_unset=True)
    runtime = sections.get("runtime", {})
    runtime |= {"max_model_len": longest, "max_running_requests": most, "page_size": PAGE_SIZE}
    return EngineConfig.from_dict(sections | {"runtime": runtime, "speculative": speculative})


def engine_of(config: EngineConfig, length: int, rounds: int) -> Engine:
    """An engine that recites scripts of so many tokens, with room for all requests and the prompts of all rounds."""
    runtime = config.runtime
    num_pages = 1 + (1 + rounds) * runtime.max_running_requests * (runtime.max_model_len // PAGE_SIZE + 2)
    parts = assemble(config, NullReporter(), num_pages=num_pages)
    live = parts.live
    if isinstance(live, str):
        raise WeightUpdateError(live)
    described = json.loads((Path(config.model.path) / "config.json").read_text())
    dtype = next(spec.dtype for spec in live.specs if spec.dtype.is_floating_point)
    engine = Engine.from_parts(parts)
    engine.update_weights(reciting_weights(described, length, engine.weights.device, dtype), partial=True)
    return engine


class Recited:
    """Replies that a model recites.

    Args:
        known: them; their prompts are cached from here on.
        length: tokens of a script.
        salt: requests of other salts may ask for the same replies, which these are not to remember.
    """

    def __init__(self, engine: Engine, known: Sequence[Known], length: int, salt: str) -> None:
        self._engine, self._known = engine, known
        self._prompts = [
            {"prompt_token_ids": one.prompt + script_of(one.reply, length, engine.vocab_size), "cache_salt": salt}
            for one in known
        ]
        engine.generate(self._prompts, greedy(1))

    def answer(self, count: int) -> tuple[float, str]:
        """Asks for all, so many at once: milliseconds a token of one of them, and what drafts brought.

        Both are of the time in which so many are answered: until there is no further one that begins.
        """
        engine, begun, before = self._engine, time.perf_counter(), self._engine.stats()
        waiting, ends = iter([*zip(self._prompts, self._known, strict=True)]), list[tuple[float, EngineStats]]()

        def answer_some() -> int:
            wrong = 0
            for prompt, one in waiting:
                wrong += engine.generate([prompt], greedy(len(one.reply)))[0].token_ids != one.reply
            ends.append((time.perf_counter(), engine.stats()))
            return wrong

        with ThreadPoolExecutor(count) as threads:
            wrong = sum(thread.result() for thread in [threads.submit(answer_some) for _ in range(count)])
        if wrong:
            sys.exit(f"{wrong} of {len(self._known)} replies are not the known ones")
        end, after = ends[0]
        tokens = after.generated_tokens - before.generated_tokens
        made, accepted = after.drafts - before.drafts, after.accepted_tokens - before.accepted_tokens
        told = f"{tokens / (tokens - accepted):.2f} | {made}, {1 + accepted / made if made else 1:.2f}"
        return (end - begun) * 1e3 * count / tokens, told


if __name__ == "__main__":
    with told_in_one_line():
        main()
