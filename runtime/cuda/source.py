"""The CUDA source of one kernel: its file with its constants in front. Read where a model is compiled."""

from __future__ import annotations

from pathlib import Path

from mllm_compile.runtime.cuda.kernel import CudaKernel

_RUNTIME = Path(__file__).parent.parent


def kernel_source(kernel: CudaKernel) -> str:
    """The source that is compiled for `kernel`."""
    defined = "".join(f"#define {name} {value}\n" for name, value in kernel.constants().items())
    files = (_RUNTIME / name for name in ("cuda/common.cuh", *kernel.headers, kernel.source))
    return "".join([defined, kernel.preamble(), *(file.read_text(encoding="utf-8") for file in files)])
