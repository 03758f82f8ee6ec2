"""`measure`: a benchmark with its reference operation timed between its rounds, and the kind of machine in the JSON."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import pytest
import torch


class Measure(Protocol):
    """Times `function`: the best of `rounds`, each of `iterations` calls, and returns what its last call returned.

    The reference operation of that name (_REFERENCES) is timed before every round, so that both see the same machine.
    `setup`, not timed either, is called before each call and returns its arguments; iterations has to be 1 then.
    """

    def __call__(
        self,
        function: Callable[..., Any],
        *,
        rounds: int = 20,
        iterations: int = 1,
        setup: Callable[[], tuple[Any, ...]] = tuple,
        reference: str = "host",
    ) -> Any: ...


@pytest.fixture
def measure(benchmark: Any) -> Measure:
    """The only way in which benchmarks here time anything."""

    def run(function, *, rounds=20, iterations=1, setup=tuple, reference="host"):
        operation = _REFERENCES[reference]
        benchmark._timer = operation.timer
        best_reference_s = float("inf")

        def prepare():
            nonlocal best_reference_s
            arguments = setup()
            start = operation.timer()
            operation.run()
            best_reference_s = min(best_reference_s, operation.timer() - start)
            return (arguments,), {}

        def timed(arguments):
            for _ in range(iterations):
                result = function(*arguments)
            return result

        result = benchmark.pedantic(timed, rounds=rounds, setup=prepare, warmup_rounds=1 if rounds > 3 else 0)
        benchmark.extra_info.update(reference=reference, reference_s=best_reference_s, iterations=iterations)
        return result

    return run


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["kind"] = machine_kind()


def machine_kind() -> str:
    """Baselines are kept by this: the GPU's name where there is one, else the CPU's instruction set."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"cpu-{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower().replace(' ', '-')}"


@dataclass(frozen=True)
class Reference:
    """An operation of a few milliseconds of the same kind of work, and the clock for both.

    Work of this process is timed by its CPU time, which other processes on shared cores add little to; what runs
    elsewhere (a GPU, another process) by the wall clock.
    """

    run: Callable[[], Any]
    timer: Callable[[], float]


def _host_work() -> None:
    """What a step does on the host: Python over small objects, and operators on small tensors."""
    table = {index: str(index) for index in range(5_000)}
    sum(len(text) for text in table.values())
    data = torch.arange(50_000, dtype=torch.float32)
    for _ in range(20):
        data = data * 1.0001 + 1.0


def _row_work() -> None:
    """Reductions over rows of logits, and a sort of some: how fast these are differs between CPUs of one kind."""
    logits = _logits()
    logits.argmax(-1)
    logits.softmax(-1)
    logits[:2].sort(-1)


@cache
def _logits() -> torch.Tensor:
    return torch.randn(32, 32_000, generator=torch.Generator().manual_seed(0))


def _copy_work() -> None:
    """48 MiB of memory copied, by four threads at once, as weights are read."""
    source, target = _copy_buffers()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(torch.Tensor.copy_, target, source))


@cache
def _copy_buffers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(12, 1 << 20), torch.zeros(12, 1 << 20)


def _process_work() -> None:
    """A fresh process that imports torch and nothing else."""
    subprocess.run([sys.executable, "-c", "import torch"], check=True)


def _gpu_work() -> None:
    """GEMMs of a few milliseconds."""
    data = _gpu_matrix()
    for _ in range(4):
        torch.mm(data, data)
    torch.cuda.synchronize()


def _launch_work() -> None:
    """Small kernels that are launched from Python one by one."""
    data = torch.zeros(8192, device="cuda")
    for _ in range(1000):
        data.add_(1.0)
    torch.cuda.synchronize()


@cache
def _gpu_matrix() -> torch.Tensor:
    return torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")


_REFERENCES = {
    "host": Reference(_host_work, time.process_time),
    "rows": Reference(_row_work, time.process_time),
    "copy": Reference(_copy_work, time.process_time),
    "process": Reference(_process_work, time.perf_counter),
    "gpu": Reference(_gpu_work, time.perf_counter),
    "launches": Reference(_launch_work, time.perf_counter),
}
