"""The library of linears in panels, compiled and loaded once a process, for tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from mllm_compile.kernels.cpu import compiled
from mllm_compile.runtime.cpu.load import load_library
from mllm_compile.runtime.ops.panels import ops  # noqa: F401  (defines the ops)
from mllm_compile.runtime.ops.panels.library import PANEL_LINEARS


@cache
def load_panel_linears() -> None:
    binary = compiled(PANEL_LINEARS, Path(mkdtemp()))
    load_library(PANEL_LINEARS, {PANEL_LINEARS.name: binary})
