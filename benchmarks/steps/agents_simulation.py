"""agents_speed without a model or a GPU: its calls on a simulated engine, and why tokens were computed and not found.

    python -m benchmarks.steps.agents_simulation TRACE [--seconds 45] [--total-tokens 70000] [--host-tokens 291264]

Steps take what was measured (benchmarks.fleet.step_costs), copies their bytes over --gb-s. One H200 is slower where
requests run behind loads: --slower multiplies what decodes take.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.fleet.step_costs import StepCosts
from benchmarks.script import existing_file, parser_of, positive, told_in_one_line
from benchmarks.steps.agents_speed import LONGEST_PAUSE_S, Call, lru_share
from benchmarks.tiers.causes import Causes
from benchmarks.tiers.simulated import TieredEngine
from mllm_compile.runtime.schedule.request import Request

CLIENT_S = 0.003  # from a call's end to when its session knows


class SimulatedReplay:
    """agents_speed's Replay on the simulated clock.

    Args:
        settings: of TieredEngine, beside its costs and whom it tells.

    Attributes:
        over, begun: as Replay has them.
        causes: for which tokens were computed.
    """

    def __init__(self, calls: list[Call], seconds: float, costs: StepCosts, **settings: Any) -> None:
        self._end, self.causes = seconds, Causes()
        self.engine = TieredEngine(costs, over=self._over, admitted=self._admitted, **settings)
        self._left: dict[str, list[Call]] = defaultdict(list)  # of each session, the next one last
        for call in reversed(calls):
            self._left[call["session"]].append(call)
        self._done: set[str] = set()
        self._behind: dict[str, list[str]] = defaultdict(list)  # sessions that wait for a call
        self._messages: dict[str, list[np.ndarray]] = {}
        self._to_begin: list[tuple[float, str, Call]] = []
        self._flying: dict[Request, tuple[Call, float, list[np.ndarray], np.ndarray]] = {}
        self.over: list[tuple[int, int, int, float]] = []
        self.begun: list[str] = []
        for session in self._left:
            self._go_on(session, 0.0)

    def run(self) -> None:
        """Runs to the end of all calls that begin in time."""
        while self._to_begin or not self.engine.is_idle:
            while self._to_begin and self._to_begin[0][0] <= self.engine.now:
                self._begin(heapq.heappop(self._to_begin)[2])
            self.engine.turn(self._to_begin[0][0] if self._to_begin else None)

    def _go_on(self, session: str, now: float) -> None:
        """Lets a session's next call begin after its pause, if all is done that it waits for."""
        left = self._left[session]
        missing = next((other for other in left[-1]["after"] if other not in self._done), None) if left else None
        if missing is not None:
            self._behind[missing].append(session)
        elif left:
            begins = now + min(left[-1]["pause_s"], LONGEST_PAUSE_S)
            if begins < self._end:
                heapq.heappush(self._to_begin, (begins, left[-1]["id"], left.pop()))

    def _begin(self, call: Call) -> None:
        source = call["parent"] if call["fork"] else call["session"]
        messages = list(self._messages.get(source, [])[: call["keep"]])
        messages += [_ids(part["seed"], part["tokens"]) for part in call["append"]]
        prompt = np.concatenate(messages)
        self.begun.append(call["id"])
        request = self.engine.add(prompt, call["out_tokens"], int(_ids(call["reply_seed"], 1)[0]))
        self._flying[request] = call, self.engine.now, messages, prompt

    def _admitted(self, request: Request) -> None:
        if not request.num_preemptions:
            self.causes.admitted(self.engine.scheduler, request, self._flying[request][3])

    def _over(self, request: Request, now: float) -> None:
        call, began, messages, prompt = self._flying.pop(request)
        self.causes.over(self.engine.scheduler, prompt)
        self.over.append((prompt.size, request.num_cached_tokens, call["out_tokens"], now + CLIENT_S - began))
        self._messages[call["session"]] = [*messages, _ids(call["reply_seed"], call["out_tokens"])]
        self._done.add(call["id"])
        for session in (call["session"], *self._behind.pop(call["id"], [])):
            self._go_on(session, now + CLIENT_S)


def _ids(seed: int, count: int) -> np.ndarray:
    """The ids of a message [count] int64, which no other one has."""
    return (seed << 24) + np.arange(count, dtype=np.int64)


def max_step_ms(text: str) -> str | float:
    """A value of runtime.max_step_ms, for argparse."""
    return text if text in ("none", "tenfold") else float(text)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("trace", type=existing_file)
    parser.add_argument("--seconds", type=positive, default=45)
    parser.add_argument("--total-tokens", type=positive, default=70_000, help="of the KV cache (default: 70000)")
    parser.add_argument("--host-tokens", type=int, default=291_264, help="of the host's memory; 0: there is none")
    parser.add_argument("--write-policy", choices=("write_back", "write_through"), default="write_back")
    parser.add_argument("--max-step", type=positive, default=8192, help="tokens of a step (default: 8192)")
    parser.add_argument(
        "--max-step-ms", type=max_step_ms, default="tenfold", help="as runtime.max_step_ms (default: tenfold)"
    )
    parser.add_argument("--gb-s", type=float, default=50.0, help="of the link (default: 50)")
    parser.add_argument("--slower", type=float, default=1.0, help="what decodes take, over what was measured")
    args = parser.parse_args()
    calls = [json.loads(line) for line in args.trace.read_text().splitlines()]
    costs = StepCosts.measured()
    costs = replace(costs, base_ms=tuple(args.slower * ms for ms in costs.base_ms), key_ms=args.slower * costs.key_ms)
    settings: dict[str, Any] = {"kv_tokens": args.total_tokens, "host_tokens": args.host_tokens}
    settings |= {"max_step": args.max_step, "max_step_ms": args.max_step_ms, "bytes_s": 1e9 * args.gb_s}
    settings["writes_through"] = args.write_policy == "write_through"
    replay = SimulatedReplay(calls, args.seconds, costs, **settings)
    replay.run()
    prompt, cached, out, taken = (np.array(column) for column in zip(*replay.over, strict=True))
    rates, found = out / taken, cached.sum() / prompt.sum()
    share = lru_share(calls, replay.begun, args.total_tokens + args.host_tokens)
    stats = replay.engine.scheduler.stats()
    print(
        f"{len(rates)} calls, cached {found:.1%} of {prompt.sum():,} tokens, {found / share:.3f} of an LRU's; end to "
        f"end p50 {np.median(taken):.3f} s, p90 {np.quantile(taken, 0.9):.3f}; output tokens over time p50 "
        f"{np.median(rates):.1f}, p90 {np.quantile(rates, 0.9):.1f} a second; preemptions {stats.preemptions}"
    )
    for cause, count in replay.causes.tokens.most_common():
        print(f"  {cause}: {count:,} tokens, {count / replay.causes.tokens.total():.1%}")
    for tier in stats.tiers:
        print(f"  {tier}")
    return 0


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main())
