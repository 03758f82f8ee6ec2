"""Compiles the CUDA C++ kernels that a model needs on Hopper (runtime/ops/stream_linear/, runtime/ops/gated_linear/,
runtime/attention/hopper/) into its runtime."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.config.resolution.device import is_hopper
from mllm_compile.errors import CompileError
from mllm_compile.kernels.nvrtc import compile_cuda, find_nvrtc
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.cuda.kernel import CudaKernel, kernel_source
from mllm_compile.runtime.ops import FAMILIES, family
from mllm_compile.runtime.program.spec import Program

if TYPE_CHECKING:
    from torch import fx

logger = logging.getLogger(__name__)

BINARY_SUFFIX = ".cubin"
_ARCHITECTURE = "sm_90a"  # wgmma is Hopper's alone
_NICENESS = 5  # as the compilers of pieces: the model is being traced meanwhile


@cache  # what is missing is said once
def can_compile_kernels(device: str) -> bool:
    """True if the kernels run on `device` and can be compiled here."""
    if not device.startswith("cuda") or torch.version.hip is not None:
        return False
    if not is_hopper(device):
        return False
    if find_nvrtc() is None:
        logger.warning("NVRTC is not found, steps are slower: pip install nvidia-cuda-nvrtc, and compile again")
        return False
    return True


def kernels_of(graph: fx.GraphModule, program: Program) -> dict[str, tuple[CudaKernel, ...]]:
    """The kernels that the program and its pieces call, by family."""
    called: list[tuple[Any, int | None]] = [(graph, None)]
    called += [(graph.get_submodule(piece), None) for piece in program.step_pieces()]
    called += [(graph.get_submodule(variant.piece), variant.max_size) for variant in program.all_variants()]
    wanted = {name: family(name).wanted(called) for name in FAMILIES}
    return {name: kernels for name, kernels in wanted.items() if kernels}


class KernelCompiler:
    """Compiles kernels in threads as soon as they are known: while the model is still being traced.

    Used with `with`: kernels that were not waited for are dropped at its end.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(
            os.cpu_count() or 1, thread_name_prefix="cuda-kernels", initializer=os.nice, initargs=(_NICENESS,)
        )
        self._binaries: dict[CudaKernel, Future[bytes]] = {}

    def __enter__(self) -> KernelCompiler:
        return self

    def __exit__(self, *raised: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def start(self, kernels: Iterable[CudaKernel]) -> None:
        """Begins with the kernels that were not begun before, and does not wait."""
        for kernel in kernels:
            if kernel not in self._binaries:
                self._binaries[kernel] = self._threads.submit(_compile, kernel)

    def binaries(self, kernels: Iterable[CudaKernel]) -> dict[str, bytes]:
        """The binaries of these kernels, by name; waits for them.

        Raises:
            CompileError: NVRTC refuses one.
        """
        wanted = list(kernels)
        self.start(wanted)
        return {kernel.name: self._binaries[kernel].result() for kernel in wanted}

    def write(self, kernels: Sequence[CudaKernel], folder: Path, reporter: Reporter) -> None:
        """Writes each as `<its name>.cubin` into `folder`.

        Raises:
            CompileError: NVRTC refuses one.
        """
        self.start(kernels)
        with reporter.stage("CUDA kernels"):
            for name, binary in self.binaries(kernels).items():
                (folder / (name + BINARY_SUFFIX)).write_bytes(binary)


def _compile(kernel: CudaKernel) -> bytes:
    try:
        return compile_cuda(kernel_source(kernel), kernel.name, _ARCHITECTURE)
    except CompileError as error:
        raise CompileError(f"{error} Set {kernel.switch} to do without it.") from error
