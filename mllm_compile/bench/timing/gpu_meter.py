"""Reads a GPU's clock, its power and what slows it down, while work runs on it (NVML).

Two runs of the same work differ where the GPU's clock did: a power cap or heat holds it down. nvidia-ml-py, which comes
with FlashInfer, reads the driver's counters. Without it, and on a CPU, nothing is read.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Self

from mllm_compile.bench.timing.clock import Stopwatch

SAMPLE_S = 0.02
_LEAST_SHARE = 0.1  # of the samples, for a reason to count
# The bits of NVML's clocks event reasons that slow a GPU down; the others are idleness and settings.
_SLOWED_BY = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """A GPU while something was measured.

    Attributes:
        clock_mhz: the median clock of its multiprocessors.
        watts: its mean power; its limit is `limit_watts`.
        slowed_by: what held the clock down for a tenth of the time or more.
    """

    clock_mhz: float
    watts: float
    limit_watts: float
    slowed_by: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of dataclasses.asdict."""
        return cls(**(data | {"slowed_by": tuple(data["slowed_by"])}))

    def __str__(self) -> str:
        slowed = f", held down by {' and '.join(self.slowed_by)}" if self.slowed_by else ""
        return f"{self.clock_mhz:.0f} MHz, {self.watts:.0f} of {self.limit_watts:.0f} W{slowed}"


@dataclass(frozen=True)
class Reading:
    """One reading: seconds since the meter was made, MHz, joules that the GPU has taken so far, NVML's reasons."""

    at: float
    clock_mhz: int
    joules: float
    reasons: int


@dataclass
class Span:
    """The readings of one stretch of work, from right before it to right after."""

    readings: list[Reading] = field(default_factory=list)

    @property
    def inside(self) -> list[Reading]:
        """The readings while the work ran; of work that was over before one was taken, the one behind it."""
        return self.readings[1:-1] or self.readings[-1:]

    @property
    def seconds(self) -> float:
        return self.readings[-1].at - self.readings[0].at

    @property
    def joules(self) -> float:
        return self.readings[-1].joules - self.readings[0].joules


class Nvml:
    """The counters of one GPU."""

    def __init__(self, nvml: ModuleType, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.limit_watts: float = nvml.nvmlDeviceGetEnforcedPowerLimit(self._gpu) / 1e3

    @classmethod
    def of(cls, device: str) -> Self | None:
        """The counters of a torch device; None on a CPU, without nvidia-ml-py, and of a GPU that lacks some."""
        if not device.startswith("cuda"):
            return None
        try:
            import pynvml
        except ModuleNotFoundError:
            return None
        import torch

        try:
            found = cls(pynvml, str(torch.cuda.get_device_properties(torch.device(device)).uuid))
            found.read(0.0)
        except pynvml.NVMLError:
            return None
        return found

    def read(self, at: float) -> Reading:
        return Reading(
            at,
            self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM),
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1e3,
            self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._gpu),
        )


class GpuMeter:
    """Reads a GPU every 20 ms of what it watches, in a thread of its own, and right before and after."""

    def __init__(self, gpu: Nvml | None) -> None:
        self.gpu = gpu
        self._watch = Stopwatch()

    @property
    def now(self) -> float:
        """Seconds since it was made, as readings have them."""
        return self._watch.seconds

    @contextmanager
    def watching(self) -> Iterator[Span]:
        """Reads the GPU meanwhile; the span is whole behind it, and empty without a GPU."""
        span = Span()
        if self.gpu is None:
            yield span
            return
        is_over = threading.Event()
        read = self.gpu.read

        def sample() -> None:
            while not is_over.wait(SAMPLE_S):
                span.readings.append(read(self.now))

        thread = threading.Thread(target=sample, daemon=True)
        span.readings.append(read(self.now))
        thread.start()
        try:
            yield span
        finally:
            is_over.set()
            thread.join()
            span.readings.append(read(self.now))

    def state(self, spans: Sequence[Span]) -> GpuState | None:
        """The GPU's state in these spans together; None without a GPU."""
        readings = [reading for span in spans for reading in span.inside]
        if self.gpu is None or not readings:
            return None
        seconds = sum(span.seconds for span in spans)
        slowed = tuple(
            name
            for bit, name in _SLOWED_BY.items()
            if sum(bool(one.reasons & bit) for one in readings) >= _LEAST_SHARE * len(readings)
        )
        return GpuState(
            clock_mhz=statistics.median(one.clock_mhz for one in readings),
            watts=sum(span.joules for span in spans) / seconds if seconds else 0.0,
            limit_watts=self.gpu.limit_watts,
            slowed_by=slowed,
        )
