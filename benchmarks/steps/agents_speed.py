"""Cached tokens and speed of agents' calls, with memory behind a KV cache that is too small for them, and without.

    python -m benchmarks.steps.agents_speed configs/qwen-8b-shape.yaml TRACE [--seconds 45] [--total-tokens 70000]

A line of TRACE is one call as JSON: `id`, `session`, `parent`, `fork`, `after` (ids that it waits for), `pause_s`,
`keep` (messages of its session, or of the parent where it is a fork), `append` ([{tokens, seed}]), `out_tokens`.
Messages are random ids; answers are the model's. Both runs end after so many seconds: their calls count that are over.
Cached tokens are compared with an LRU's of the same calls in the same order, as benchmarks.server.session_eviction has
it, of as many tokens as the KV cache and the memory hold together.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet.step_costs import StepCosts
from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from benchmarks.server.agent_trace import OVERHEAD, prompts_of
from benchmarks.server.session_eviction import Lru
from benchmarks.tiers.step_times import StepTimes
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.config.sources import with_runtime

_VOCABULARY = 32_000
LONGEST_PAUSE_S = 3.0

Call = dict[str, Any]


class Replay:
    """The calls of a trace on one engine, a thread for each session.

    Attributes:
        over: (prompt tokens, cached tokens, output tokens, seconds) of each call that is over.
        begun: ids of calls, in the order in which they began.
    """

    def __init__(self, engine: Engine, calls: list[Call], seconds: float) -> None:
        self._engine, self._end = engine, time.monotonic() + seconds
        self._vocabulary = min(_VOCABULARY, engine.vocab_size)
        self._done = {call["id"]: threading.Event() for call in calls}
        self._messages: dict[str, list[list[int]]] = {}
        self.over: list[tuple[int, int, int, float]] = []
        self.begun: list[str] = []
        sessions: dict[str, list[Call]] = defaultdict(list)
        for call in calls:
            sessions[call["session"]].append(call)
        self._threads = [threading.Thread(target=self._session, args=(mine,)) for mine in sessions.values()]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()

    def _session(self, calls: list[Call]) -> None:
        for call in calls:
            for other in call["after"]:
                self._done[other].wait(max(0.0, self._end - time.monotonic()))
            time.sleep(max(0.0, min(call["pause_s"], LONGEST_PAUSE_S, self._end - time.monotonic())))
            if time.monotonic() >= self._end:
                return
            self._one(call)
            self._done[call["id"]].set()

    def _one(self, call: Call) -> None:
        source = call["parent"] if call["fork"] else call["session"]
        messages = list(self._messages.get(source, [])[: call["keep"]])
        messages += [ids_of(part["seed"], part["tokens"], self._vocabulary) for part in call["append"]]
        prompt = [token for message in messages for token in message]
        self.begun.append(call["id"])
        began = time.monotonic()
        output = self._engine.generate([prompt], greedy(call["out_tokens"]), progress=False)[0]
        taken = time.monotonic() - began
        if output.error is None:
            self.over.append((len(prompt), output.num_cached_tokens or 0, len(output.token_ids), taken))
        self._messages[call["session"]] = [*messages, output.token_ids]


def lru_share(calls: list[Call], begun: list[str], tokens: int) -> float:
    """The share of prompt tokens that an LRU of so many has of calls in this order."""
    prompts = {call["id"]: (call, prompt) for call, prompt in prompts_of(calls)}
    lru, hits, total = Lru(tokens), 0, 0
    for number, name in enumerate(begun):
        call, prompt = prompts[name]
        without = [(role, count - OVERHEAD, seed) for role, count, seed in prompt]  # which messages here do not have
        hits += lru.call(number, without, ("assistant", call["out_tokens"] - OVERHEAD, call["reply_seed"]))
        total += sum(count for _, count, _ in prompt)
    return hits / total


def ids_of(seed: int, count: int, vocabulary: int) -> list[int]:
    """A message."""
    found: list[int] = np.random.default_rng(seed).integers(0, vocabulary, count).tolist()
    return found


def measure(config: EngineConfig, calls: list[Call], args: Namespace, what: str) -> float:
    """The 90th percentile of output tokens over a call's time."""
    with Engine(config) as engine:
        if what == "without" or args.only_memory:
            print(machine_line(str(engine.config.runtime.device)))
        times = StepTimes(engine, StepCosts.measured()) if args.steps else None
        replay = Replay(engine, calls, args.seconds)
        replay.run()
        stats = engine.stats()
        page_size = engine.config.runtime.page_size
    if not replay.over:
        sys.exit("no call was over in time; give it more --seconds")
    prompt, cached, out, taken = (np.array(column) for column in zip(*replay.over, strict=True))
    rates = out / taken
    p90 = float(np.quantile(rates, 0.9))
    print(
        f"{what}: {len(rates)} calls in {args.seconds} s, cached {cached.sum() / prompt.sum():.1%} of {prompt.sum():,} "
        f"tokens; end to end p50 {np.median(taken):.3f} s, p90 {np.quantile(taken, 0.9):.3f}; output tokens over time "
        f"p50 {np.median(rates):.1f}, p90 {p90:.1f} a second; preemptions {stats.preemptions}",
    )
    tokens = args.total_tokens + sum(tier.capacity for tier in stats.tiers) * page_size
    share, found = lru_share(calls, replay.begun, tokens), cached.sum() / prompt.sum()
    print(f"  an LRU of {tokens:,} tokens has {share:.1%}: the engine {found / share:.3f} of it")
    for tier in stats.tiers:
        print(f"  {tier}")
    if times is not None:
        times.tell()
    return p90


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--seconds", type=positive, default=45, help="of each run (default: 45)")
    parser.add_argument("--total-tokens", type=positive, default=70_000, help="of the KV cache (default: 70000)")
    parser.add_argument("--host-gib", type=float, default=25.0, help="of the host's memory (default: 25)")
    parser.add_argument("--steps", action="store_true", help="print what steps of each kind took")
    parser.add_argument("--only-memory", action="store_true", help="leave out the run without memory")
    args = parser.parse_args()
    calls = [json.loads(line) for line in args.trace.read_text().splitlines()]
    runtime = {"max_total_tokens": args.total_tokens, "max_model_len": min(args.total_tokens, 40_960)}
    config = with_runtime(EngineConfig.from_yaml(args.config), runtime)
    without = None if args.only_memory else measure(config, calls, args, "without")
    behind = measure(with_runtime(config, {"kv_offloading_size": args.host_gib}), calls, args, "with the memory")
    if without is not None:
        print(f"90th percentile of output tokens over time: {behind / without:.2f} x")
    return 0


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main())
