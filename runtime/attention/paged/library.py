"""The library that attends, and the layers that it serves; free of torch."""

from __future__ import annotations

from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.cpu.library import CpuLibrary

PAGED_ATTENTION = CpuLibrary(
    name="paged_attention", source="attention/paged/attend.cpp", switch="runtime.without: [paged_attention]"
)
DTYPES = ("float32", "bfloat16")  # of queries and of the cache, which have the same
_WIDTH = 16  # floats of the widest vector: rows of heads are whole ones


def serves(layer: LayerSpec) -> bool:
    """True if the library attends in `layer`. Latents with an up-projection may be expanded, tables of distances read,
    and keys chosen, which torch does."""
    is_plain = layer.up_projection is None and not layer.has_distance_bias and not layer.top_k
    return is_plain and layer.head_dim % _WIDTH == 0 and layer.v_head_dim % _WIDTH == 0
