"""Makes the GPU's context on a thread, beside the imports of a start. Free of torch.

Torch and the kernels' launches use the same context (the device's primary one), and find it made. Errors are left to
them: they say what is missing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.sources import runtime_settings
from mllm_compile.process.timeline import Timeline

_MOST_WAIT_S = 30.0  # a driver that hangs holds no failed start for longer
_CUDA = re.compile(r"auto|cuda(?::(\d{1,9}))?")  # another device is refused where it is looked for


@contextmanager
def early_context(source: EngineConfig | Path, timeline: Timeline) -> Iterator[None]:
    """Makes the context of the engine's own GPU meanwhile; on a CPU it does nothing.

    Use it in the process that will own the device. A context takes half a gigabyte there and does not outlive a fork. A
    start that fails gives it back, unless torch or another library uses it by then.
    """
    index = _own_gpu(source)
    if index is None:
        yield
        return
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # the driver reads it once; torch sets it so, but later
    made: list[_Context] = []
    making = threading.Thread(target=_make, args=(index, timeline, made), name="mllm-context", daemon=True)
    making.start()
    try:
        yield
    except BaseException:
        making.join(_MOST_WAIT_S)
        for context in made:
            context.give_back()
        raise
    finally:
        making.join(_MOST_WAIT_S)  # a process must not end within the driver's start


def _own_gpu(source: EngineConfig | Path) -> int | None:
    """The GPU of rank 0, by the driver's number; None: a CPU's, another host's, or nobody knows yet."""
    settings = runtime_settings(source)
    if settings is None or settings.distributed_executor_backend != "mp" or settings.node_rank:
        return None
    cuda = _CUDA.fullmatch(settings.device)
    return int(cuda[1] or 0) if cuda and _has_cuda() else None


def _has_cuda() -> bool:
    """True if torch is a build for NVIDIA GPUs; it is not imported for that."""
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # it was put into sys.modules by hand
        return False
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "lib/libc10_cuda.so").is_file()


@dataclass(frozen=True)
class _Context:
    """A device's primary context, which the driver keeps for as long as anybody has retained it."""

    driver: ctypes.CDLL
    device: ctypes.c_int

    def give_back(self) -> None:
        self.driver.cuDevicePrimaryCtxRelease_v2(self.device)


def _make(index: int, timeline: Timeline, made: list[_Context]) -> None:
    driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    if driver is None:
        return
    with timeline.stage("device context"):
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
            return
        if not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
            made.append(_Context(driver, device))


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
