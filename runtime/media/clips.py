"""Towers that take sounds of one length: shorter ones are filled up, and each becomes as many features.

The tower is told where each ends; features behind that are alike. A sound is one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.conformers import ConformerTower
from mllm_compile.runtime.media.tower import SOUND_INPUT, Grid, Read


@dataclass(frozen=True, kw_only=True)
class ClipTower(ConformerTower):
    """A tower of this protocol."""

    def num_features(self, grid: Grid) -> int:
        return self.rows_of(self.frames) // self.merge

    def read(self, tensors: Mapping[str, np.ndarray]) -> Read:
        found = super().read(tensors)
        _, (chunks, length, _) = found.images[0]
        if chunks > 1:
            raise RequestError(
                f"{SOUND_INPUT} has {(chunks - 1) * self.frames + length:,} frames that are heard; expected at most "
                f"{self.frames:,}. Cut the sound into shorter ones"
            )
        return found

    def sample_grids(self) -> tuple[Grid, Grid]:
        """Both as long: in a batch the model's convolutions see what fills up a shorter one."""
        part: Grid = (1, self.frames // 2 + 3, 0)
        return part, part

    def largest(self, features: int) -> list[Grid]:
        one: Grid = (1, self.frames, 0)
        return [one] * math.ceil(features / self.num_features(one))
