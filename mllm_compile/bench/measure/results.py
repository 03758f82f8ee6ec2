"""The results of a benchmark, as plain data that goes to JSON and back: measurements, runs of engines, the machine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from mllm_compile.bench.timing.gpu_meter import GpuState
from mllm_compile.bench.timing.rounds import spread
from mllm_compile.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One line of a table.

    Attributes:
        name: tpot, prefill, mixed256, …
        unit: ms and s are better low, tok/s better high.
        median: of the samples (tpot: computed from the medians of its calls).
        samples: one a repeat, in the order in which they were taken.
        batch: requests at once, where the work has several.
        limit: the best value by the machine's measured ceilings, in the same unit; None if not known.
        processes: the median of each process, where several were measured.
        gpu: the GPU's state in each process; empty without one.
    """

    name: str
    unit: str
    median: float
    samples: tuple[float, ...]
    batch: int | None = None
    limit: float | None = None
    processes: tuple[float, ...] = ()
    gpu: tuple[GpuState, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        unit: str,
        samples: Sequence[float],
        *,
        batch: int | None = None,
        median: float | None = None,
    ) -> Self:
        median = statistics.median(samples) if median is None else median
        return cls(name=name, unit=unit, median=median, samples=tuple(samples), batch=batch)

    @property
    def spread(self) -> float:
        """(largest − smallest sample) / median."""
        return spread(self.samples, self.median)

    @property
    def spread_of_processes(self) -> float:
        """The same of the medians of several processes; 0 of one."""
        return spread(self.processes, self.median)

    @property
    def share_of_limit(self) -> float | None:
        """The share of the limit, 1 being all that the machine can do; None without a limit."""
        if self.limit is None:
            return None
        return self.median / self.limit if self.unit.startswith("tok/s") else self.limit / self.median

    def with_limit(self, limit: float) -> Self:
        return replace(self, limit=limit)

    @property
    def key(self) -> tuple[str, int | None]:
        """The part of a line that the same line of another run shares."""
        return self.name, self.batch


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The device's measured rates in the same command: bytes read and floating-point operations a second; of products
    in fp8 where some of the model's may be."""

    read_bytes_s: float
    flops_s: float
    fp8_flops_s: float | None = None

    def of_devices(self, count: int) -> Ceilings:
        """The rates of as many that share the work evenly, and wait for nothing."""
        return self._times(count)

    def of_one_of(self, count: int) -> Ceilings:
        """The inverse of of_devices."""
        return self._times(1 / count)

    def products_s(self, flops: float, fp8_flops: float) -> float:
        """The least seconds of so many operations, and of so many more that may be of products in fp8."""
        return flops / self.flops_s + fp8_flops / (self.fp8_flops_s or self.flops_s)

    def _times(self, factor: float) -> Ceilings:
        fp8_flops_s = None if self.fp8_flops_s is None else self.fp8_flops_s * factor
        rates = {"read_bytes_s": self.read_bytes_s * factor, "flops_s": self.flops_s * factor}
        return Ceilings(**rates, fp8_flops_s=fp8_flops_s)


# A run with random weights that reads fewer of the experts than this share of the expected ones is no result.
_FEWEST_EXPERTS = 0.95


@dataclass(frozen=True, kw_only=True)
class ActiveExperts:
    """The experts of a layer that a decode step chooses, in the mean of steps and layers.

    Attributes:
        batch: requests of the step.
        num_experts: those that a layer has.
        touched: as counted.
        expected: of tokens that choose by chance.
    """

    batch: int
    num_experts: int
    touched: float
    expected: float

    @property
    def are_enough(self) -> bool:
        return self.touched >= _FEWEST_EXPERTS * self.expected

    @property
    def share(self) -> float:
        return self.touched / self.num_experts

    def __str__(self) -> str:
        of_layer = f"{self.touched:.1f} of {self.num_experts} experts a layer"
        return f"{of_layer} at batch {self.batch} ({self.expected:.1f} expected)"


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """One engine's measurements, from fresh processes, most often one.

    Attributes:
        engine: mllm, vllm or transformers; of an ablation, what is left out of mllm.
        version: the engine's.
        settings: its settings, every default filled in as far as the engine tells.
        measurements: its results, in the order of the work.
    """

    engine: str
    version: str
    settings: Mapping[str, Any]
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One `mllm-compile bench` command.

    Attributes:
        command: latency, throughput, startup or ablation.
        work: the work's sizes.
        model: name of the model.
        environment: commit, GPU, torch, driver, date, …
        ceilings: None where nothing was measured (startup).
        runs: one an engine, or a variant of an ablation.
        experts: those that decode steps of a mixture of experts were counted to choose.
    """

    command: str
    work: Mapping[str, Any]
    model: str
    environment: Mapping[str, str]
    ceilings: Ceilings | None
    runs: tuple[EngineRun, ...] = field(default=())
    experts: tuple[ActiveExperts, ...] = field(default=())

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """
        Raises:
            ConfigError: the file is not one that `write` made.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or "runs" not in data:
                raise ValueError("it has no runs (`bench roofline` writes maps of a step, which have no table)")
            if data.pop("format") != FORMAT:
                raise ValueError(f"it is of another format than {FORMAT}, which this version writes")
            ceilings = data.pop("ceilings")
            runs = tuple(run_from_json(run) for run in data.pop("runs"))
            experts = tuple(ActiveExperts(**one) for one in data.pop("experts", ()))
            return cls(**data, ceilings=None if ceilings is None else Ceilings(**ceilings), runs=runs, experts=experts)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}. Expected a file that `mllm-compile bench … --json` wrote."
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ConfigError(
                f"{path} is no result of `mllm-compile bench … --json`: {reason}. Measure again, or leave it out."
            ) from None


def joined(runs: Sequence[EngineRun]) -> EngineRun:
    """Several processes of one engine and work as one run with the medians of the processes' medians."""
    if len(runs) == 1:
        return runs[0]
    lines = []
    for same in zip(*(run.measurements for run in runs), strict=True):
        medians = tuple(line.median for line in same)
        samples = tuple(sample for line in same for sample in line.samples)
        gpu = tuple(state for line in same for state in line.gpu)
        median = statistics.median(medians)
        lines.append(replace(same[0], median=median, samples=samples, processes=medians, gpu=gpu))
    return replace(runs[0], measurements=tuple(lines))


def run_from_json(data: dict[str, Any]) -> EngineRun:
    """The inverse of dataclasses.asdict."""
    return EngineRun(**(data | {"measurements": tuple(map(measurement_from_json, data["measurements"]))}))


def measurement_from_json(data: dict[str, Any]) -> Measurement:
    """The inverse of dataclasses.asdict."""
    tuples = {name: tuple(data.get(name, ())) for name in ("samples", "processes")}
    return Measurement(**(data | tuples | {"gpu": tuple(map(GpuState.from_json, data.get("gpu", ())))}))
