"""The result file of one engine and model: what it has, what it lacks, and each new figure at once in the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mllm_compile.bench.limits.limits import ModelFigures, with_latency_limits, with_throughput_limits
from mllm_compile.bench.measure.results import ActiveExperts, BenchResult, Ceilings, EngineRun, Measurement
from mllm_compile.bench.measure.workloads import LatencyWork, ThroughputWork

COMMAND = "figures"


@dataclass(frozen=True)
class Work:
    """The work that each engine and model is measured on."""

    latency: LatencyWork
    throughput: ThroughputWork
    warm_starts: int

    def sizes(self) -> dict[str, Any]:
        """All of it, for the record."""
        return {"latency": asdict(self.latency), "throughput": asdict(self.throughput)}

    @property
    def largest_batch(self) -> int:
        return max(self.latency.largest_batch, self.throughput.largest_batch)

    @property
    def longest_request(self) -> int:
        return max(self.latency.longest_request, self.throughput.longest_request)


class Sheet:
    """One result file, which grows by what is measured."""

    def __init__(self, path: Path, empty: BenchResult, engine: str, work: Work) -> None:
        """
        Args:
            empty: the result without a run. A file of another commit or device is begun anew.
        """
        self._path, self._engine, self._work = path, engine, work
        kept = BenchResult.read(path) if path.exists() else None
        same = kept is not None and all(
            kept.environment.get(name) == empty.environment[name] for name in ("commit", "device")
        )
        self.was_of = None if kept is None or same else kept.environment.get("commit", "an unknown commit")
        self._result = kept if kept is not None and same else empty

    @property
    def lines(self) -> dict[tuple[str, int | None], Measurement]:
        """The measurements by name and batch."""
        return {line.key: line for run in self._result.runs for line in run.measurements}

    @property
    def has_experts(self) -> bool:
        return bool(self._result.experts)

    def begin(self, version: str, settings: Mapping[str, Any]) -> None:
        """Notes the engine's version and settings."""
        measurements = tuple(self.lines.values())
        run = EngineRun(engine=self._engine, version=version, settings=settings, measurements=measurements)
        self._result = replace(self._result, runs=(run,))

    def add(self, lines: Iterable[Measurement], figures: ModelFigures, ceilings: Ceilings) -> list[Measurement]:
        """Puts lines with their limits into the file, and returns them. A further start is a further sample."""
        added = []
        for line in lines:
            before = self.lines.get(line.key)
            if line.unit == "s" and before is not None:
                line = Measurement.of(line.name, line.unit, [*before.samples, *line.samples])
            added.append(_limited(line, self._work, figures, ceilings, self._result.experts))
            self._set(self.lines | {line.key: added[-1]})
        self.write()
        return added

    def count_experts(self, experts: Sequence[ActiveExperts], figures: ModelFigures, ceilings: Ceilings) -> list[int]:
        """Takes the counted experts into the limits, and batches out whose random weights chose too few: returns
        these."""
        few = [one.batch for one in experts if not one.are_enough]
        self._result = replace(self._result, experts=tuple(experts))
        kept = {key: line for key, line in self.lines.items() if key[1] not in few}
        self._set({key: _limited(line, self._work, figures, ceilings, experts) for key, line in kept.items()})
        self.write()
        return few

    def write(self) -> None:
        """Writes the file in one go, so that no reader finds half of it."""
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._result = replace(self._result, environment={**self._result.environment, "date": now})
        new = self._path.with_suffix(".new")
        self._result.write(new)
        os.replace(new, self._path)

    def _set(self, lines: Mapping[tuple[str, int | None], Measurement]) -> None:
        (run,) = self._result.runs
        self._result = replace(self._result, runs=(replace(run, measurements=tuple(lines.values())),))


def _limited(
    line: Measurement, work: Work, figures: ModelFigures, ceilings: Ceilings, experts: Sequence[ActiveExperts]
) -> Measurement:
    """The line with its limit; a start has none."""
    if line.unit == "s":
        return line
    if line.batch is not None:
        return with_latency_limits([line], work.latency, figures, ceilings, experts)[0]
    return with_throughput_limits([line], work.throughput, figures, ceilings)[0]
