"""The experts' linears that the kernel takes; free of torch, so that passes can ask anywhere."""

from __future__ import annotations

from mllm_compile.runtime.cuda.units import TILE_UNITS, UNIT_ROWS

BLOCK = UNIT_ROWS * TILE_UNITS  # rows of an expert in a tile, at most
_OUTPUTS_UNIT, _INPUTS_UNIT = 32, 64


def is_taken(outputs: int, inputs: int) -> bool:
    """True if an expert's weight with so many outputs (activated ones, of a gated linear) divides into tiles."""
    return outputs % _OUTPUTS_UNIT == 0 and inputs % _INPUTS_UNIT == 0
