"""Captures CUDA graphs: one memory pool and one stream for all, no garbage collection while a capture runs.

Owns the mechanics of one capture, and the figures of all; the kinds (kinds.py) decide what to capture.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from mllm_compile.runtime.graph_mode import GraphKind

Result = TypeVar("Result")


@dataclass(frozen=True)
class CaptureFigures:
    """The cost of one captured size."""

    kind: GraphKind
    num_tokens: int
    seconds: float
    mib: float  # of device memory, graphs and their pool; later sizes reuse what earlier ones took


@dataclass
class GraphCapturer:
    """One pool, one stream. Graphs that are captured here never run at the same time, so their memory may overlap."""

    device: torch.device
    figures: list[CaptureFigures] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)

    def capture(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Records what `run` launches. Call inside `session()`.

        Not torch.cuda.graph(): it synchronizes and empties the allocator's cache around each capture, which for a
        thousand small graphs is most of the time.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        with warnings.catch_warnings():
            # A piece may be views alone, as between a convolution and its recurrence: torch takes that for a mistake.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)
            try:
                result = run()
            except BaseException:
                graph.capture_end()
                raise
            graph.capture_end()
        return graph, result

    @contextmanager
    def session(self) -> Iterator[None]:
        """Captures happen on the capture stream, without garbage collection.

        A collection in the middle of a capture may unload a module or free an event, which kills the capture. None is
        made ahead either: it takes a tenth of a second.
        """
        torch.cuda.synchronize(self.device)
        was_enabled = gc.isenabled()
        gc.disable()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            torch.cuda.synchronize(self.device)
            if was_enabled:
                gc.enable()

    @contextmanager
    def measured(self, kind: GraphKind, num_tokens: int) -> Iterator[None]:
        """Notes seconds and memory of one size."""
        start, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        yield
        taken = free - torch.cuda.mem_get_info(self.device)[0]
        self.figures.append(CaptureFigures(kind, num_tokens, time.perf_counter() - start, taken / 2**20))


class WeakTensor:
    """A tensor's place without holding its memory: lets the pool give the memory to the next captured size.

    The address stays mapped as long as the pool lives. Its content is valid from the replay that writes it until
    another graph of the pool is replayed.
    """

    __slots__ = ("_device", "_dtype", "_raw", "_shape", "_stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        self._raw = _RawBytes(tensor.data_ptr(), max(span, 1) * tensor.element_size())
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._device = tensor.device if tensor.is_cuda else None  # pinned memory is every device's

    def tensor(self) -> torch.Tensor:
        """A non-owning tensor at the place, on the current device.

        Raises:
            RuntimeError: the place is another device's.
        """
        # With its index: given "cuda" alone torch asks the driver which device owns the place. Pinned memory belongs to
        # the one that was current when it was pinned; if that is another one, torch would make a copy there.
        device = torch.device("cuda", torch.cuda.current_device())
        if self._device not in (None, device):
            raise RuntimeError(f"memory of {self._device} was asked for on {device}")
        flat = torch.as_tensor(self._raw, device=device).view(self._dtype)
        return flat.as_strided(self._shape, self._stride)


class _RawBytes:
    """https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 2,
        }
