"""Measures the figures of the pages' tables on this machine's GPU, each into its file as soon as it is there.

    python -m benchmarks.figures --into docs/lab/results [--only 8b,0.6b] [--engines mllm,vllm] [--seconds 480]

The same command goes on where it was ended. `python -m benchmarks.figures.pages` then makes the tables.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.figures.measure import PARTS, Order, OutOfTime, measure
from benchmarks.figures.shapes import RESULTS, SHAPES
from benchmarks.figures.sheet import Work
from mllm_compile.bench.adapters import ENGINES, check_installed
from mllm_compile.bench.measure.environment import COMMIT_VARIABLE
from mllm_compile.bench.measure.workloads import BATCHES, REPEATS, LatencyWork, ThroughputWork
from mllm_compile.errors import MllmError
from mllm_compile.process.interruption import ended_by_sigterm


def parse(arguments: list[str]) -> Order:
    """The order of a command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--only", type=_names([shape.name for shape in SHAPES]), help="shapes, comma-separated")
    parser.add_argument("--engines", type=_names(list(ENGINES)), default=["mllm"], help="comma-separated")
    parser.add_argument(
        "--parts", type=_names(PARTS), default=list(PARTS), help="comma-separated; a cold start is in all"
    )
    parser.add_argument("--batch", type=_numbers, default=BATCHES, help="requests at once, comma-separated")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="samples of each figure; a cold start has one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many, with what is measured")
    parser.add_argument(
        "--own-caches", action="store_true", help="take runtimes that were compiled before; there is no cold start"
    )
    parser.add_argument("--commit", help="the commit of these sources, where they are a copy without a repository")
    options = parser.parse_args(arguments)
    if options.commit:
        os.environ[COMMIT_VARIABLE] = options.commit
    return Order(
        shapes=[shape for shape in SHAPES if options.only is None or shape.name in options.only],
        engines=options.engines,
        parts=options.parts,
        work=Work(
            LatencyWork(batches=options.batch, repeats=options.repeats),
            ThroughputWork(repeats=options.repeats),
            warm_starts=options.repeats,
        ),
        folder=options.into,
        deadline=time.monotonic() + options.seconds,
        own_caches=options.own_caches,
    )


def _names(known: list[str] | tuple[str, ...]):
    def parse_names(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not known; known: {', '.join(known)}")
        return names

    return parse_names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(arguments: list[str]) -> int:
    order = parse(arguments)
    try:
        for engine in order.engines:
            check_installed(engine)
        order.folder.mkdir(parents=True, exist_ok=True)
        lacking = measure(order)
    except OutOfTime:
        print("the time was over before the machine was known", file=sys.stderr)
        return 1
    except MllmError as error:
        print(error, file=sys.stderr)
        return 2
    if lacking:
        print("not measured:", *lacking, sep="\n  ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with ended_by_sigterm():
        code = main(sys.argv[1:])
    sys.exit(code)
