"""Compiles the kernels of a model's linears for few tokens on Hopper (runtime/stream_linear/) into its runtime."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.errors import CompileError
from mllm_compile.nvrtc import compile_cuda, find_nvrtc
from mllm_compile.progress import Reporter
from mllm_compile.runtime.program import Program
from mllm_compile.runtime.stream_linear.ops import binary_name, plain_kind, residual_kind
from mllm_compile.runtime.stream_linear.shapes import CAPABILITY, TOKEN_BUCKETS, LinearKind, choose_tiling
from mllm_compile.runtime.stream_linear.source import kernel_source

if TYPE_CHECKING:
    from torch import fx

BINARY_SUFFIX = ".cubin"
_ARCHITECTURE = "sm_90a"


def can_compile_linears(device: str) -> bool:
    """Whether the kernels run on `device` and can be compiled here."""
    if not device.startswith("cuda") or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(torch.device(device)) == CAPABILITY and find_nvrtc() is not None


def streamed_linears(graph: fx.GraphModule, program: Program) -> tuple[LinearKind, ...]:
    """The linears that the program's forms for few tokens call kernels for."""
    ops: Any = torch.ops.mllm
    kinds: dict[LinearKind, None] = {}
    for form in program.all_small_forms():
        piece: Any = graph.get_submodule(form.piece)
        for node in piece.graph.nodes:
            if node.target is ops.stream_linear.default:
                weight, squares, _, gated = node.args[1:]
                kinds[plain_kind(_value(weight), None if squares is None else _value(squares), gated)] = None
            elif node.target in (ops.stream_linear_residual.default, ops.stream_linear_residual_norm.default):
                is_normed = node.target is ops.stream_linear_residual_norm.default
                kinds[residual_kind(_value(node.args[1]), norm_next=is_normed)] = None
    return tuple(kinds)


def _value(node: Any) -> torch.Tensor:
    return node.meta["val"]


class LinearCompiler:
    """Compiles kernels in threads, from the moment that somebody knows which: while the model is still being traced.

    Used with `with`: what nobody waited for is dropped at its end.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="linears")
        self._binaries: dict[tuple[LinearKind, int], Future[bytes]] = {}

    def __enter__(self) -> LinearCompiler:
        return self

    def __exit__(self, *raised: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def start(self, kinds: Iterable[LinearKind]) -> None:
        """Begins with all buckets of those that were not begun before, and does not wait."""
        for kind in kinds:
            for tokens in TOKEN_BUCKETS:
                if (kind, tokens) not in self._binaries:
                    self._binaries[kind, tokens] = self._threads.submit(_compile, kind, tokens)

    def write(self, kinds: Sequence[LinearKind], folder: Path, reporter: Reporter) -> None:
        """Writes `<binary_name>.cubin` of every linear and bucket of tokens into `folder`.

        Raises:
            CompileError: NVRTC refuses one.
        """
        self.start(kinds)
        with reporter.stage("linear kernels"):
            for kind in kinds:
                for tokens in TOKEN_BUCKETS:
                    binary = self._binaries[kind, tokens].result()
                    (folder / (binary_name(kind, tokens) + BINARY_SUFFIX)).write_bytes(binary)


def _compile(kind: LinearKind, tokens: int) -> bytes:
    try:
        return compile_cuda(kernel_source(choose_tiling(kind, tokens)), binary_name(kind, tokens), _ARCHITECTURE)
    except CompileError as error:
        raise CompileError(f"{error} Set compile.disable_passes: [stream_linears] to do without it.") from error
