"""Compiles CUDA kernels for the scripts that time them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.cuda.kernel import CudaKernel


def binaries_of(compiler: KernelCompiler, kernels: Iterable[CudaKernel]) -> dict[str, bytes]:
    """The binary of each kernel by its name, as functions that load kernels take them."""
    with tempfile.TemporaryDirectory() as folder:
        compiler.write(tuple(kernels), Path(folder), NullReporter())
        return {path.stem: path.read_bytes() for path in Path(folder).iterdir()}
