"""How many threads compute a model on a CPU, and how they wait for each other.

A step of a small model is hundreds of parallel regions of some microseconds: one thread is faster there than several
that meet at the end of each. And where another process holds a core, threads wait for it at each barrier: libgomp's
spin for milliseconds before they sleep, so that a step takes ten times as long and more. They give up soon where a
process has more OpenMP threads than the machine has cores: that is what `wait_briefly` sees to. (OMP_WAIT_POLICY and
GOMP_SPINCOUNT do it too, but are read when torch is imported, which a program may have done long ago.)
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

# Every token reads all weights: one thread reads so many in about 3 ms, hundreds of times what a meeting takes.
WEIGHT_BYTES_OF_A_THREAD = 32 << 20
_ELEMENTS_OF_A_THREAD = 1 << 15  # torch gives no thread fewer elements of a simple op
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CpuThreads:
    """How many, for people why, and whether a user has said so."""

    count: int
    why: str
    is_given: bool = False


def choose_threads(weight_bytes: int, cores: int, allowed: int) -> CpuThreads:
    """Choose as many threads as there is work for.

    Args:
        weight_bytes: of the whole model.
        cores: that this process may use; see usable_cores.
        allowed: torch's own setting, which a program may have lowered.
    """
    wanted = max(1, weight_bytes // WEIGHT_BYTES_OF_A_THREAD)
    if wanted < min(cores, allowed):
        return CpuThreads(wanted, f"for {weight_bytes >> 20} MiB of weights, of {cores} cores")
    if allowed < cores:
        return CpuThreads(allowed, f"torch's setting, of {cores} cores")
    return CpuThreads(cores, "all cores that this process may use")


def threads_for(weight_bytes: int) -> CpuThreads:
    """OMP_NUM_THREADS where it is set, else choose_threads for this process."""
    if os.environ.get("OMP_NUM_THREADS"):
        return CpuThreads(torch.get_num_threads(), "OMP_NUM_THREADS", is_given=True)
    return choose_threads(weight_bytes, usable_cores(), torch.get_num_threads())


def use_threads(count: int) -> None:
    """Sets the number for what the calling thread computes from now on, and for nothing else of this process."""
    if torch.get_num_threads() == count:  # also makes torch set its own, which it would do later
        return
    for set_threads in _setters():
        set_threads(count)


@contextmanager
def one_thread() -> Iterator[None]:
    """Has the calling thread compute alone within: many small operations wait longer than they compute."""
    before = torch.get_num_threads()
    use_threads(1)
    try:
        yield
    finally:
        use_threads(before)


@cache
def _setters() -> tuple[Callable[[int], object], ...]:
    linked = ctypes.CDLL(torch._C.__file__)  # the libraries that it is linked with are looked through too
    # MKL has a number of its own where a program has called torch.set_num_threads.
    found = (getattr(linked, name, None) for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"))
    return tuple(one for one in found if one is not None)


@cache
def wait_briefly() -> None:
    """From now on threads of this process that wait for each other sleep soon. Once a process; takes no CPU time."""
    is_there = threading.Event()

    def stay() -> None:
        cores = os.cpu_count() or 1
        use_threads(cores)
        torch.ones(cores * _ELEMENTS_OF_A_THREAD).neg_()  # makes a team of threads, which ends with this one
        is_there.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="mllm-idle-team", daemon=True).start()
    is_there.wait()


def usable_cores(cgroups: Path = _CGROUPS, own_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may run on at once: its affinity, and its container's share, rounded down."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(int(share) for share in _quotas(cgroups, own_cgroup))]))


def cpu_model() -> str:
    """The processor's name, as the kernel has it."""
    names = (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name"))
    return next(names, platform.machine())


def _quotas(cgroups: Path, own_cgroup: Path) -> list[float]:
    """CPU time a second that this process' control groups allow, of both versions."""
    shares = [_share(*_words(cgroups / "cpu" / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")))]
    for line in _lines(own_cgroup):
        if line.startswith("0::/"):
            own = Path(line[4:])
            shares += [_share(*_words([cgroups / folder / "cpu.max"])) for folder in (own, *own.parents)]
    return [share for share in shares if share is not None]


def _share(quota: str = "max", period: str = "") -> float | None:
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _words(paths: Iterable[Path]) -> list[str]:
    return [word for path in paths for line in _lines(path) for word in line.split()][:2]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []
