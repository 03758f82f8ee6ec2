"""Several images as one run of a tower: their arrays one after another, and the bounds of segments."""

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


def tower_inputs(
    tower: Tower, images: Sequence[tuple[np.ndarray, Grid]]
) -> tuple[dict[str, np.ndarray], dict[str, HostSegments]]:
    """Arrays [F, …] and segments by the names of the tower's inputs.

    Args:
        images: pixels and grid of each; at least one.
    """
    parts: dict[str, list[np.ndarray]] = {}
    lengths: dict[str, list[np.ndarray]] = {}
    features = 0
    for pixels, grid in images:
        for name, array in tower.inputs(pixels, grid).items():
            parts.setdefault(name, []).append(array + features if name in tower.counted_inputs else array)
        for name, array in tower.segments(grid).items():
            lengths.setdefault(name, []).append(array)
        features += tower.num_features(grid)
    arrays = {name: np.concatenate(members) for name, members in parts.items()}
    return arrays, {name: _segments(np.concatenate(members)) for name, members in lengths.items()}


def _segments(lengths: np.ndarray) -> HostSegments:
    bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return HostSegments(bounds, int(lengths.max()))
