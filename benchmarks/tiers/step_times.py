"""The time of an engine's steps by what they held, beside what the simulation takes them for."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np

from benchmarks.fleet.step_costs import StepCosts
from benchmarks.tiers.behind import scheduler_of
from mllm_compile import Engine
from mllm_compile.runtime.schedule.pace import load_of
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch

_SMALL, _MEDIUM = 512, 2048  # tokens of prompts


class StepTimes:
    """Notes the steps of an engine from now on.

    Attributes:
        rows: of each step its kind; its milliseconds; those of the host that nothing hid; what the simulation says.
        planned_ms: of the host, for each call of `schedule`.
    """

    def __init__(self, engine: Engine, costs: StepCosts) -> None:
        self._costs = costs
        self._scheduler: Any = scheduler_of(engine)
        self._schedule, self._step_took = self._scheduler.schedule, self._scheduler.step_took
        self.rows: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        self.planned_ms: list[float] = []
        self._scheduler.schedule, self._scheduler.step_took = self._plan, self._took

    def _plan(self) -> ScheduledBatch | None:
        began = time.perf_counter()
        batch: ScheduledBatch | None = self._schedule()
        self.planned_ms.append(1e3 * (time.perf_counter() - began))
        return batch

    def _took(self, batch: ScheduledBatch, seconds: float, host_seconds: float = 0.0) -> None:
        load, tiers = load_of(batch), self._scheduler.tiers
        beside = "loads" if tiers is not None and tiers._loads else "none"
        size = load.prompt_tokens
        prompts = "none" if not size else "few" if size <= _SMALL else "some" if size <= _MEDIUM else "many"
        kind = f"prompt tokens {prompts:4}, decodes {'yes' if load.num_decodes else 'no':3}, copies {beside}"
        said = self._costs.decodes_ms(load, 1) + self._costs.prompts_ms(load, 1)
        self.rows[kind].append((1e3 * seconds, 1e3 * host_seconds, said))
        self._step_took(batch, seconds, host_seconds)

    def tell(self) -> None:
        """Prints a line for each kind."""
        for kind, rows in sorted(self.rows.items()):
            took, host, said = np.array(rows).T
            print(
                f"  steps, {kind}: {len(rows)}, {took.sum() / 1e3:.2f} s, median {np.median(took):.2f} ms, mean "
                f"{took.mean():.2f}, simulated {said.mean():.2f}; host behind {host.sum() / 1e3:.2f} s"
            )
        planned = np.array(self.planned_ms)
        print(
            f"  schedule: {planned.size} calls, {planned.sum() / 1e3:.2f} s, median {np.median(planned):.2f} ms, "
            f"99th percentile {np.quantile(planned, 0.99):.2f}"
        )
