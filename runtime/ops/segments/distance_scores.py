"""Scores of attention between contents and distances, as DeBERTa's disentangled attention has them.

Shape legend: C segments, H heads, n rows of each, D head dim, W columns of distances, R farthest distance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class DistanceScores(NamedTuple):
    """
    Attributes:
        keys: [W, H, D], what queries are multiplied by; None: this part is left out.
        queries: [W, H, D], what keys are multiplied by; None: this part is left out.
        columns: [2R + 1] int64, the column of each distance j - i; those beyond R are as R.
    """

    keys: torch.Tensor | None
    queries: torch.Tensor | None
    columns: torch.Tensor

    def of(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The scores [C, H, n, n] that queries and keys [C, H, n, D] have with distances, ahead of their scale.

        Only the 2n - 1 distances that the segments have are multiplied. The products [n, 2n - 1] are read askew: row i
        begins i columns earlier, so that a column is a key and no distance.
        """
        n = queries.shape[2]
        reach = self.columns.shape[0] // 2
        far = torch.arange(1 - n, n, device=queries.device).clamp(-reach, reach) + reach
        columns = self.columns[far]
        parts = []
        if self.keys is not None:
            parts.append(_askew(queries @ self.keys[columns].permute(1, 2, 0)))
        if self.queries is not None:
            parts.append(_askew(keys @ self.queries[columns.flip(0)].permute(1, 2, 0)).transpose(2, 3))
        return parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()


def _askew(products: torch.Tensor) -> torch.Tensor:
    """The view [C, H, n, n] of products [C, H, n, 2n - 1] whose element (i, j) is theirs at (i, j - i + n - 1)."""
    segments, heads, n, width = products.shape
    strides = heads * n * width, n * width, width - 1, 1
    return products.contiguous().as_strided((segments, heads, n, n), strides, n - 1)
