"""Several images as one run of a tower: their arrays one after another, and the bounds of segments.

Pixels are left to the code that brings them to the device: they are most of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.media.tower import Grid, Tower


@dataclass(frozen=True, eq=False)
class HostSegments:
    """Bounds [segments + 1] int32 of segments, and the rows of the longest."""

    bounds: np.ndarray
    longest: int


def tower_inputs(tower: Tower, grids: Sequence[Grid]) -> tuple[dict[str, np.ndarray], dict[str, HostSegments]]:
    """Arrays [F, …] and segments by the names of the tower's inputs, less `pixel_values`.

    Args:
        grids: of each image; at least one.
    """
    parts: dict[str, list[np.ndarray]] = {}
    lengths: dict[str, list[np.ndarray]] = {}
    counted = 0
    for grid in grids:
        for name, array in tower.inputs(grid).items():
            parts.setdefault(name, []).append(array + counted if name in tower.counted_inputs else array)
        for name, array in tower.segments(grid).items():
            lengths.setdefault(name, []).append(array)
        counted += tower.num_counted(grid)
    arrays = {name: np.concatenate(members) for name, members in parts.items()}
    return arrays, {name: _segments(np.concatenate(members)) for name, members in lengths.items()}


def _segments(lengths: np.ndarray) -> HostSegments:
    bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return HostSegments(bounds, int(lengths.max()))
