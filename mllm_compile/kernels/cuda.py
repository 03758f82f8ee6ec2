"""Compiles the CUDA C++ kernels that a model needs on Hopper (runtime/ops/stream_linear/, runtime/ops/gated_linear/,
runtime/attention/hopper/) into its runtime."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.config.device import is_hopper
from mllm_compile.errors import CompileError
from mllm_compile.kernels.nvrtc import compile_cuda, find_nvrtc
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.cuda.source import kernel_source
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.gated_linear.kernel import GatedKernel, gated_kernels
from mllm_compile.runtime.ops.stream_linear.linear import TOKEN_BUCKETS, LinearKind, LinearTiling
from mllm_compile.runtime.ops.stream_linear.ops import plain_kind, residual_kind
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling
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


def streamed_linears(graph: fx.GraphModule, program: Program) -> tuple[LinearTiling, ...]:
    """The kernels that the program's forms for few tokens call: of each linear one for every bucket of their tokens."""
    most_tokens: dict[LinearKind, int] = {}
    for form in program.all_small_forms():
        for kind in _kinds(graph.get_submodule(form.piece)):
            most_tokens[kind] = max(form.max_size, most_tokens.get(kind, 0))
    return tuple(
        choose_tiling(kind, tokens) for kind, most in most_tokens.items() for tokens in TOKEN_BUCKETS if tokens <= most
    )


def _kinds(piece: Any) -> Iterator[LinearKind]:
    ops: Any = torch.ops.mllm
    for node in piece.graph.nodes:
        if node.target is ops.stream_linear.default:
            weight, squares, _, gated, *bias = node.args[1:]
            yield plain_kind(_value(weight), None if squares is None else _value(squares), gated, bool(bias))
        elif node.target in (ops.stream_linear_residual.default, ops.stream_linear_residual_norm.default):
            is_normed = node.target is ops.stream_linear_residual_norm.default
            yield residual_kind(_value(node.args[1]), norm_next=is_normed)


def _value(node: Any) -> torch.Tensor:
    return node.meta["val"]


def gated_linears(graph: fx.GraphModule, program: Program) -> tuple[GatedKernel, ...]:
    """The kernels that the program's pieces for many tokens call."""
    pieces: list[Any] = [graph.get_submodule(piece) for piece in program.step_pieces()]
    weights = [
        _value(node.args[1]) for piece in pieces for node in piece.graph.nodes if node.target is op("gated_linear")
    ]
    shapes = dict.fromkeys(tuple(map(int, weight.shape)) for weight in weights)
    return tuple(kernel for rows, columns in shapes for kernel in gated_kernels(rows, columns))


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

    def write(self, kernels: Sequence[CudaKernel], folder: Path, reporter: Reporter) -> None:
        """Writes each as `<its name>.cubin` into `folder`.

        Raises:
            CompileError: NVRTC refuses one.
        """
        self.start(kernels)
        with reporter.stage("CUDA kernels"):
            for kernel in kernels:
                (folder / (kernel.name + BINARY_SUFFIX)).write_bytes(self._binaries[kernel].result())


def _compile(kernel: CudaKernel) -> bytes:
    try:
        return compile_cuda(kernel_source(kernel), kernel.name, _ARCHITECTURE)
    except CompileError as error:
        raise CompileError(f"{error} Set {kernel.switch} to do without it.") from error
