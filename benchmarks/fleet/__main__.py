"""Simulates agents' sessions over engines behind the router of `--replicas`, beside other rules. No model runs.

Run: python -m benchmarks.fleet --engines 64 --sessions 10000 --at-once 1024

The router is real. Work takes what docs/lab/results has of Qwen3-8B's shape; it flows by the scheduler's rules
(flow_engine.py), or with --stepped the real scheduler and prefix cache take their steps, which is a hundred times the
work. Sessions come from benchmarks.server.agent_trace. A token here stands for --fold tokens, and with --stepped a step
of decodes for as many steps. With --parts several runs share the sessions, each in a process and with a seed of its
own, from empty caches on. What is known so far goes to stderr.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace

import numpy as np

from benchmarks.fleet.engine import Engine
from benchmarks.fleet.flow_engine import FlowEngine
from benchmarks.fleet.rules import RULES, rule_of
from benchmarks.fleet.simulation import Figures, Simulation
from benchmarks.fleet.step_costs import StepCosts
from benchmarks.fleet.stepped_engine import SteppedEngine
from benchmarks.script import names_of, parser_of, positive, processes_of, told_in_one_line
from benchmarks.server.agent_trace import PRESETS, Generator
from mllm_compile.server.replicas.routing import TOKEN_BYTES
from mllm_compile.server.replicas.text import BLOCK

KV_TOKENS = 700_000  # of an H200 beside the model, in bfloat16


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", type=positive, default=64)
    parser.add_argument("--sessions", type=positive, default=10_000)
    parser.add_argument("--at-once", type=positive, default=1024, help="sessions at once (default: 1024)")
    parser.add_argument("--preset", choices=PRESETS, default="codex")
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--kv-tokens", type=positive, default=KV_TOKENS, help="of each engine")
    parser.add_argument("--fold", type=int, choices=(1, 2, 4, 8, 16, 32, 64), default=32)
    parser.add_argument("--stepped", action="store_true", help="with the real scheduler and prefix cache")
    parser.add_argument("--rules", type=names_of(RULES), default=list(RULES), help="with commas between")
    parser.add_argument("--parts", type=positive, default=1, help="runs that share the sessions (default: 1)")
    args = parser.parse_args()
    if args.sessions < args.parts:
        parser.error(f"--parts {args.parts}: there are {args.sessions} sessions; give at most one part for each")
    print(f"{args.sessions} sessions of {args.preset}, {args.at_once} at once, over {args.engines} engines")
    print("| rule | cached | first token p50 | p90 | p99 | call p50 | most busy / mean | out tokens/s | CPU s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    sessions = [args.sessions // args.parts + (part < args.sessions % args.parts) for part in range(args.parts)]
    with processes_of(args.parts) as processes:
        for name in args.rules:
            running = [processes.submit(simulated, name, args, *part) for part in enumerate(sessions)]
            runs, seconds = zip(*(one.result() for one in running), strict=True)
            print(f"| {name} | {row_of(Figures.of_all(runs), args.fold)} | {sum(seconds):.0f} |", flush=True)


def simulated(name: str, args: Namespace, part: int, sessions: int) -> tuple[Figures, float]:
    """A run of a rule, of a part of the sessions, and its CPU seconds; the sessions are the same ones for each rule."""
    fold, preset, began = args.fold, PRESETS[args.preset], time.process_time()
    longest = 2 * preset["limit"]
    costs = StepCosts.measured()

    def engine() -> Engine:
        if args.stepped:
            return SteppedEngine(costs, args.kv_tokens, longest, fold)
        return FlowEngine(costs, args.kv_tokens, fold)

    generator = Generator(preset, args.seed + part, 1 / fold, 1.0, 3600.0)
    rule = rule_of(name, args.engines, args.kv_tokens, BLOCK // TOKEN_BYTES // fold)

    def tell(num_over: int, figures: Figures) -> None:
        told = f"{name}, part {part}, {num_over} of {sessions} sessions: {row_of(figures, fold)}"
        print(told, file=sys.stderr, flush=True)

    figures = Simulation([engine() for _ in range(args.engines)], rule, generator, sessions, args.at_once, tell).run()
    return figures, time.process_time() - began


def row_of(figures: Figures, fold: int) -> str:
    """The cells of a run."""
    first = np.percentile(figures.first_token_s, (50, 90, 99))
    busy = np.array(figures.busy_s)
    cells = [f"{figures.cached_tokens / figures.prompt_tokens:.1%}", *(f"{one:.2f} s" for one in first)]
    cells += [f"{np.median(figures.call_s):.1f} s", f"{busy.max() / busy.mean():.2f}"]
    return " | ".join([*cells, f"{figures.new_tokens * fold / figures.clock_s:,.0f}"])


if __name__ == "__main__":
    with told_in_one_line():
        main()
