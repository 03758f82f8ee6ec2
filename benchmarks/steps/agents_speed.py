"""Cached tokens and speed of agents' calls, with memory behind a KV cache that is too small for them, and without.

    python -m benchmarks.steps.agents_speed configs/qwen-8b-shape.yaml TRACE [--seconds 45] [--engines mllm,vllm]

A line of TRACE is one call as JSON: `id`, `session`, `parent`, `fork`, `after` (ids that it waits for), `pause_s`,
`keep` (messages of its session, or of the parent where it is a fork), `append` ([{tokens, seed}]), `out_tokens`.
Messages are random ids; answers are the model's. Each run ends after so many seconds: its calls count that are over.
Cached tokens of `mllm` are compared with an LRU's of the same calls in the same order, as
benchmarks.server.session_eviction has it, of as many tokens as the KV cache and the memory hold together.

vLLM gets a KV cache and an offload of the same sizes, and its own defaults. Its engine has a process of its own: ours
has one with the engine `served`, which is `mllm` behind our server.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from argparse import Namespace
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.fleet.step_costs import StepCosts
from benchmarks.script import existing_file, greedy, names_of, parser_of, positive, told_in_one_line
from benchmarks.server.agent_trace import OVERHEAD, prompts_of
from benchmarks.server.session_eviction import Lru
from benchmarks.tiers.served_answers import served_answers
from benchmarks.tiers.step_times import StepTimes
from benchmarks.tiers.vllm_answers import VllmAnswers, need_vllm
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.config.sources import with_runtime

_VOCABULARY = 32_000
LONGEST_PAUSE_S = 3.0
_LONGEST = 40_960  # tokens of a call

Call = dict[str, Any]


class Answers(Protocol):
    """An engine to which threads give calls."""

    def answer(self, prompt: list[int], max_tokens: int) -> tuple[int, list[int]] | None:
        """Cached tokens of the prompt, and the answer; None: it failed."""


class OwnAnswers:
    """Our engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def answer(self, prompt: list[int], max_tokens: int) -> tuple[int, list[int]] | None:
        """See Answers."""
        output = self._engine.generate([prompt], greedy(max_tokens), progress=False)[0]
        return None if output.error is not None else (output.num_cached_tokens or 0, output.token_ids)


class Replay:
    """The calls of a trace on one engine, a thread for each session.

    Attributes:
        over: (prompt tokens, cached tokens, output tokens, seconds) of each call that is over.
        begun: ids of calls, in the order in which they began.
    """

    def __init__(self, engine: Answers, vocab_size: int, calls: list[Call], seconds: float) -> None:
        self._engine, self._end = engine, time.monotonic() + seconds
        self._vocabulary = min(_VOCABULARY, vocab_size)
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
        answer = self._engine.answer(prompt, call["out_tokens"])
        taken = time.monotonic() - began
        cached, token_ids = answer or (0, [])
        if answer is not None:
            self.over.append((len(prompt), cached, len(token_ids), taken))
        self._messages[call["session"]] = [*messages, token_ids]


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


def tell(replay: Replay, seconds: int, what: str) -> float:
    """Prints what calls had; gives the 90th percentile of output tokens over a call's time."""
    if not replay.over:
        sys.exit("no call was over in time; give it more --seconds")
    prompt, cached, out, taken = (np.array(column) for column in zip(*replay.over, strict=True))
    rates = out / taken
    p90 = float(np.quantile(rates, 0.9))
    print(
        f"{what}: {len(rates)} calls in {seconds} s, cached {cached.sum() / prompt.sum():.1%} of {prompt.sum():,} "
        f"tokens; end to end p50 {np.median(taken):.3f} s, p90 {np.quantile(taken, 0.9):.3f}; output tokens over time "
        f"p50 {np.median(rates):.1f}, p90 {p90:.1f} a second"
    )
    return p90


def config_of(args: Namespace, host_gib: float) -> EngineConfig:
    """The config with the sizes that are asked for."""
    runtime = {"max_total_tokens": args.total_tokens, "max_model_len": min(args.total_tokens, _LONGEST)}
    return with_runtime(EngineConfig.from_yaml(args.config), runtime | {"kv_offloading_size": host_gib})


def measure(calls: list[Call], args: Namespace, host_gib: float) -> float:
    """The 90th percentile of output tokens over a call's time, of our engine."""
    with Engine(config_of(args, host_gib)) as engine:
        time.sleep(args.settle)
        print(machine_line(str(engine.config.runtime.device)))
        times = StepTimes(engine, StepCosts.measured()) if args.steps else None
        replay = Replay(OwnAnswers(engine), engine.vocab_size, calls, args.seconds)
        replay.run()
        stats = engine.stats()
        page_size = engine.config.runtime.page_size
    p90 = tell(replay, args.seconds, "with the memory" if host_gib else "without")
    tokens = args.total_tokens + sum(tier.capacity for tier in stats.tiers) * page_size
    share = lru_share(calls, replay.begun, tokens)
    found = sum(cached for _, cached, *_ in replay.over) / sum(prompt for prompt, *_ in replay.over)
    print(f"  an LRU of {tokens:,} tokens has {share:.1%}: the engine {found / share:.3f} of it")
    print(f"  preemptions {stats.preemptions}")
    for tier in stats.tiers:
        print(f"  {tier}")
    if times is not None:
        times.tell()
    return p90


def setting_of(args: Namespace) -> Setting:
    """The facts that engines in processes of their own are given."""
    return Setting.from_config(str(args.config), 1, min(args.total_tokens, _LONGEST))


def measure_served(calls: list[Call], args: Namespace, host_gib: float) -> float:
    """Likewise, behind our server."""
    with served_answers(config_of(args, host_gib)) as server:
        time.sleep(args.settle)
        replay = Replay(server, setting_of(args).vocab_size, calls, args.seconds)
        replay.run()
    return tell(replay, args.seconds, "served with the memory" if host_gib else "served without")


def measure_vllm(calls: list[Call], args: Namespace, host_gib: float) -> float:
    """Likewise, of vLLM."""
    setting, began = setting_of(args), time.monotonic()
    with closing(VllmAnswers(setting, args.total_tokens, host_gib)) as engine:
        print(f"vLLM is ready after {time.monotonic() - began:.1f} s")
        time.sleep(args.settle)
        replay = Replay(engine, setting.vocab_size, calls, args.seconds)
        replay.run()
    what = f"vLLM, {host_gib:g} GiB of its offload" if host_gib else "vLLM without its offload"
    return tell(replay, args.seconds, what)


_ENGINES = {"mllm": measure, "served": measure_served, "vllm": measure_vllm}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("trace", type=existing_file)
    parser.add_argument("--seconds", type=positive, default=45, help="of each run (default: 45)")
    parser.add_argument("--total-tokens", type=positive, default=70_000, help="of the KV cache (default: 70000)")
    parser.add_argument("--host-gib", type=float, default=25.0, help="of the host's memory (default: 25)")
    parser.add_argument("--steps", action="store_true", help="print what steps of each kind took, of mllm")
    parser.add_argument("--only-memory", action="store_true", help="leave out the run without memory")
    parser.add_argument("--engines", type=names_of(_ENGINES), default=["mllm"], help=f"of {', '.join(_ENGINES)}")
    parser.add_argument(
        "--settle", type=float, default=0.0, help="seconds before the first call: the host's memory is registered then"
    )
    args = parser.parse_args()
    if args.steps and "mllm" not in args.engines:
        parser.error("--steps: steps of mllm alone are seen; name it among --engines")
    calls = [json.loads(line) for line in args.trace.read_text().splitlines()]
    if "vllm" in args.engines:
        need_vllm()
    sizes = [args.host_gib] if args.only_memory else [0.0, args.host_gib]
    p90: dict[tuple[str, float], float] = {}
    for engine, host_gib in itertools.product(args.engines, sizes):
        p90[engine, host_gib] = _ENGINES[engine](calls, args, host_gib)
    own = p90.pop((args.engines[0], args.host_gib))
    for (engine, host_gib), other in p90.items():
        print(f"90th percentile of output tokens over time: {own / other:.2f} x {engine}'s with {host_gib:g} GiB")
    return 0


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main())
