"""Compiles the kernels of a model's linears for few tokens on Hopper (runtime/stream_linear/) into its runtime."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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


def compile_linears(kinds: Sequence[LinearKind], folder: Path, reporter: Reporter) -> None:
    """Writes `<binary_name>.cubin` for every linear and bucket of tokens into `folder`.

    Raises:
        CompileError: NVRTC refuses one.
    """

    def compile_one(kind: LinearKind, tokens: int) -> None:
        name = binary_name(kind, tokens)
        binary = compile_cuda(kernel_source(choose_tiling(kind, tokens)), name, _ARCHITECTURE)
        (folder / (name + BINARY_SUFFIX)).write_bytes(binary)

    with reporter.stage("linear kernels"), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for done in [pool.submit(compile_one, kind, tokens) for kind in kinds for tokens in TOKEN_BUCKETS]:
            done.result()
