"""Defines panels: how a weight's rows lie in memory for the CPU's linears.

Sixteen rows are a panel. Their first units follow each other, then their second ones, so that a vector's lanes are
sixteen outputs, and one stream of memory is read. A unit is four bytes of values (one float32, two bfloat16, four or
eight integers), or one scale. A panel takes the bytes that its rows took; tensors keep their shapes.
"""

from __future__ import annotations

import torch

from mllm_compile.runtime.quantised.scheme import WeightScheme

ROWS = 16  # of a panel
VALUES_UNIT = 4  # bytes
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_MOST_WORDS = 4 << 20  # moved at once: bounds what that takes beside the weight


def fits_panels(scheme: WeightScheme, rows: int, columns: int) -> bool:
    """True if linears of so many outputs and inputs compute from weights of this scheme in panels."""
    inputs = {"int4": 8, "int8": 4, "mxfp4": 8}.get(scheme.name, 0)  # of a unit
    if not inputs or scheme.kind == "int4_lanes" or rows % ROWS or not rows:
        return False
    return scheme.group > 0 and columns % scheme.group == 0 and scheme.group % inputs == 0


def put_in_panels(weight: torch.Tensor, unit: int) -> None:
    """Orders the rows of `weight` [N, C], or experts' [E, N, C], contiguous, as panels; N is a multiple of ROWS.

    Args:
        unit: bytes that stay together: VALUES_UNIT for values, an element's for scales.
    """
    panels = weight.flatten(0, -2).view(_WORDS[unit]).unflatten(0, (-1, ROWS))
    step = max(_MOST_WORDS // max(panels[0].numel(), 1), 1) if len(panels) else 1
    for start in range(0, len(panels), step):
        some = panels[start : start + step]
        some.copy_(some.transpose(1, 2).contiguous().view(some.shape))


def in_rows(weight: torch.Tensor, unit: int) -> torch.Tensor:
    """The weight [N, C], or [E, N, C], whose panels these are."""
    words = weight.flatten(0, -2).view(_WORDS[unit])
    rows = words.view(words.shape[0] // ROWS, -1, ROWS).transpose(1, 2).contiguous().view(words.shape)
    return rows.view(weight.dtype).view(weight.shape)
