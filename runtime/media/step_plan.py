"""The part of a step's plan that is about images: what rank 0 tells the ranks that follow it. Free of torch.

Shape legend: R requests of a step, T tokens, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class MediaPlan:
    """Positions of a step with images, and where its features are.

    Attributes:
        positions: [T] int64, of all tokens that take no feature.
        deltas: [R] int32: what positions of decodes are beyond their index.
        rows: [T] int64 of the pool of features, 0 for tokens that take none; empty: no token takes one.
        axes: [A, T] int64 positions, as many as the model has axes, where `rows` are.
        runs: of each run of the tower, in order, [F] int64 rows that it fills.
        blocks: [B, 4] int64 tokens that see each other in both directions, as Block of forward_batch.py has them.
    """

    positions: np.ndarray
    deltas: np.ndarray
    rows: np.ndarray = field(default_factory=lambda: NO_ROWS)
    axes: np.ndarray = field(default_factory=lambda: NO_ROWS)
    runs: tuple[np.ndarray, ...] = ()
    blocks: np.ndarray = field(default_factory=lambda: NO_ROWS.reshape(0, 4))

    def part(self, requests: np.ndarray, tokens: np.ndarray) -> MediaPlan:
        """The plan of some requests alone, whose features are among those that all runs of the tower fill.

        Args:
            requests: [R'] their places among R, ascending; none: a token of the dummy row.
            tokens: [T'] the places of their tokens among T.
        """
        if not requests.size:
            rows, axes = (NO_ROWS, NO_ROWS) if not self.rows.size else (_DUMMY, np.zeros((len(self.axes), 1), np.int64))
            return MediaPlan(_DUMMY, _DUMMY.astype(self.deltas.dtype), rows, axes, self.runs)
        has_features = self.rows.size > 0
        blocks = self.blocks[np.isin(self.blocks[:, 0], requests)].copy()
        lengths = blocks[:, 2] - blocks[:, 1]
        blocks[:, 0] = np.searchsorted(requests, blocks[:, 0])
        blocks[:, 1] = np.searchsorted(tokens, blocks[:, 1])
        blocks[:, 2] = blocks[:, 1] + lengths
        return MediaPlan(
            self.positions[tokens],
            self.deltas[requests],
            self.rows[tokens] if has_features else NO_ROWS,
            self.axes[:, tokens] if has_features else NO_ROWS,
            self.runs,
            blocks,
        )


_DUMMY = np.zeros(1, dtype=np.int64)
