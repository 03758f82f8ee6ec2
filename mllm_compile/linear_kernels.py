"""Compiles the kernels of a model's linears for few tokens on Hopper (runtime/stream_linear/) into its runtime."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.errors import CompileError
from mllm_compile.nvrtc import compile_cuda, find_nvrtc
from mllm_compile.progress import Reporter
from mllm_compile.runtime.program import Program
from mllm_compile.runtime.stream_linear.choice import choose_tiling
from mllm_compile.runtime.stream_linear.ops import plain_kind, residual_kind
from mllm_compile.runtime.stream_linear.shapes import CAPABILITY, TOKEN_BUCKETS, LinearKind, LinearTiling
from mllm_compile.runtime.stream_linear.source import kernel_source

if TYPE_CHECKING:
    from torch import fx

logger = logging.getLogger(__name__)

BINARY_SUFFIX = ".cubin"
_ARCHITECTURE = "sm_90a"
_NICENESS = 5  # as the compilers of pieces: the model is being traced meanwhile


@cache  # what is missing is said once
def can_compile_linears(device: str) -> bool:
    """Whether the kernels run on `device` and can be compiled here."""
    if not device.startswith("cuda") or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(torch.device(device)) != CAPABILITY:
        return False
    if find_nvrtc() is None:
        logger.warning("NVRTC is not found, linears are not streamed: pip install nvidia-cuda-nvrtc, and compile again")
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
            weight, squares, _, gated = node.args[1:]
            yield plain_kind(_value(weight), None if squares is None else _value(squares), gated)
        elif node.target in (ops.stream_linear_residual.default, ops.stream_linear_residual_norm.default):
            is_normed = node.target is ops.stream_linear_residual_norm.default
            yield residual_kind(_value(node.args[1]), norm_next=is_normed)


def _value(node: Any) -> torch.Tensor:
    return node.meta["val"]


class LinearCompiler:
    """Compiles kernels in threads, from the moment that somebody knows which: while the model is still being traced.

    Used with `with`: what nobody waited for is dropped at its end.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(
            os.cpu_count() or 1, thread_name_prefix="linears", initializer=os.nice, initargs=(_NICENESS,)
        )
        self._binaries: dict[LinearTiling, Future[bytes]] = {}

    def __enter__(self) -> LinearCompiler:
        return self

    def __exit__(self, *raised: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def start(self, tilings: Iterable[LinearTiling]) -> None:
        """Begins with those that were not begun before, and does not wait."""
        for tiling in tilings:
            if tiling not in self._binaries:
                self._binaries[tiling] = self._threads.submit(_compile, tiling)

    def write(self, tilings: Sequence[LinearTiling], folder: Path, reporter: Reporter) -> None:
        """Writes each as `<its name>.cubin` into `folder`.

        Raises:
            CompileError: NVRTC refuses one.
        """
        self.start(tilings)
        with reporter.stage("linear kernels"):
            for tiling in tilings:
                (folder / (tiling.name + BINARY_SUFFIX)).write_bytes(self._binaries[tiling].result())


def _compile(tiling: LinearTiling) -> bytes:
    try:
        return compile_cuda(kernel_source(tiling), tiling.name, _ARCHITECTURE)
    except CompileError as error:
        raise CompileError(f"{error} Set compile.disable_passes: [stream_linears] to do without it.") from error
