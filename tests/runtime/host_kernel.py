"""Runs a kernel's own source on a host, thread by thread, for its indices and barriers; host_cuda.h is its CUDA.

It shows nothing of a GPU's memory model: copies are there at once, and each access is seen by all.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import mllm_compile.runtime.cuda.kernel as cuda
from mllm_compile.runtime.cuda.kernel import CudaKernel
from tests.hang_guard import HANG_S

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

_HEADER = Path(__file__).parent / "host_cuda.h"
_BODY = r"(?:(?!^\}).)*"  # of a function that begins at the left margin
# A kernel's own functions of assembly.
_WITHIN_A_LINE, _OVER_LINES = r"[^\n]*asm volatile[^\n]*\}", rf"\n{_BODY}asm volatile{_BODY}^\}}"
_OF_ASSEMBLY = re.compile(rf"^__device__ __forceinline__ [^;{{]*\{{(?:{_WITHIN_A_LINE}|{_OVER_LINES})\n", re.M | re.S)
_MEMORY = re.compile(r"extern __shared__ [^;]*memory\[\];")


def host_program(kernel: CudaKernel, main: str, folder: Path) -> Path:
    """Compiles the kernel with `main`, which calls launch; returns the program."""
    defined = "".join(f"#define {name} {value}\n" for name, value in kernel.constants().items())
    runtime = Path(cuda.__file__).parents[1]
    source = "".join((runtime / name).read_text() for name in (*kernel.headers, kernel.source))
    source = _MEMORY.sub("char* memory = shared_memory;", _OF_ASSEMBLY.sub("", source))
    return compiled(f"{defined}{source}\n{main}", folder)


def compiled(source: str, folder: Path) -> Path:
    """The program of a source that host_cuda.h is ahead of."""
    (folder / "kernel.cpp").write_text(f'#include "{_HEADER}"\n{source}')
    command = ["g++", "-std=c++20", "-O1", "-w", "-pthread", "kernel.cpp", "-o", "kernel"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "kernel"


def run_program(program: Path, *arguments: object) -> None:
    """Runs it; fails where it says a fault, or its threads wait for each other."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
