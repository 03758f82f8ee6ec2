"""Results of made-up runs."""

from __future__ import annotations

from mllm_compile.bench.measure.results import BenchResult, Ceilings, EngineRun, Measurement

CEILINGS = Ceilings(read_bytes_s=4e12, flops_s=8e14)


def tpot(batch: int, *samples: float, limit: float | None = None) -> Measurement:
    line = Measurement.of("tpot", "ms", samples, batch=batch)
    return line if limit is None else line.with_limit(limit)


def run(engine: str, *lines: Measurement) -> EngineRun:
    return EngineRun(engine=engine, version="1", settings={"dtype": "bfloat16"}, measurements=lines)


def result(*runs: EngineRun, command: str = "latency") -> BenchResult:
    return BenchResult(
        command=command,
        work={"batches": [1, 8]},
        model="m",
        environment={"commit": "abc", "device": "a GPU"},
        ceilings=CEILINGS,
        runs=runs,
    )
