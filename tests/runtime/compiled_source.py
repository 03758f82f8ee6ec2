"""Compiles CUDA sources of kernels with nvcc, for Hopper."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def compile_source(source: str, folder: Path) -> str:
    """The messages of nvcc and of its assembler; fails where it does."""
    (folder / "kernel.cu").write_text(source)
    command = ["nvcc", "-cubin", "-arch=sm_90a", "-Xptxas", "-v", "kernel.cu", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def check_compiles_without_spilling(source: str, folder: Path) -> None:
    """Compiles the source of one kernel: all its values are in registers, and nothing is warned of."""
    said = compile_source(source, folder)
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0"]
    assert "warning" not in said
    assert "Performance Loss" not in said, "products of wgmma wait for each other"
