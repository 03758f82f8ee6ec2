"""The library of linears over weights in panels; free of torch."""

from __future__ import annotations

from mllm_compile.runtime.cpu.library import CpuLibrary

PANEL_LINEARS = CpuLibrary(
    name="panel_linears",
    source="ops/panels/linears.cpp",
    switch="compile.disable_passes: [pack_linears]",
    headers=tuple(f"ops/panels/{name}.h" for name in ("vectors", "floats", "integers", "exact", "rounded", "experts")),
    registers_ops=True,
)
