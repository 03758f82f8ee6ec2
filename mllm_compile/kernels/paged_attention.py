"""Attention of a CPU by the library runtime/attention/paged/attend.cpp, where it serves a layer."""

from __future__ import annotations

from mllm_compile.config.resolution.device import has_libraries
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.kernels.piece import WrittenPiece, with_kernels
from mllm_compile.runtime.attention.paged.library import DTYPES, PAGED_ATTENTION, serves
from mllm_compile.runtime.program.spec import Program


def add_paged_attention(config: ResolvedConfig, program: Program) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """The program whose layers on a CPU have the library, where there is a compiler for it; it is no piece."""
    runtime, dtype = config.runtime, config.model.dtype
    is_served = dtype in DTYPES and runtime.kv_cache_dtype == dtype and runtime.attention_backend == "torch"
    if not is_served or not has_libraries(runtime.device, config.compile.backend):
        return program, ()
    served = {layer.name: PAGED_ATTENTION for layer in (*program.layers, *program.cross_layers) if serves(layer)}
    return with_kernels(program, "paged", served), ()
