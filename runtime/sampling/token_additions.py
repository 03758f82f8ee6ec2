"""Values added to the logits of a few listed token ids, a list a row: logit_bias, and what min_tokens forbids.

Shape legend: S rows of a step, K entries of the longest list, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn.functional import pad

from mllm_compile.runtime.device.upload import upload


class TokenBiases:
    """Lists of (token id, value), padded with (0, 0.0), which changes nothing; K grows by doubling."""

    def __init__(self, max_reqs: int, device: torch.device) -> None:
        self._ids = torch.zeros(max_reqs, 0, dtype=torch.int64, device=device)
        self._values = torch.zeros(max_reqs, 0, dtype=torch.float32, device=device)

    def set(self, row: int, additions: Mapping[int, float]) -> None:
        """Make `additions` (token id → value) the row's list; an empty one clears it."""
        count, width = len(additions), self._ids.shape[1]
        if count > width:
            added = (1 << (count - 1).bit_length()) - width
            self._ids, self._values = pad(self._ids, (0, added)), pad(self._values, (0, added))
        self._ids[row, :count] = upload(np.fromiter(additions.keys(), np.int64, count), self._ids.device)
        self._values[row].zero_()
        self._values[row, :count] = upload(np.fromiter(additions.values(), np.float32, count), self._ids.device)

    def add_to(self, logits: torch.Tensor, rows: torch.Tensor, active: torch.Tensor | None = None) -> None:
        """Add the rows' values to their logits, in place. logits: [S, V] float32; rows: [S] int64; active: [S] bool."""
        values = self._values[rows]
        if active is not None:
            values = torch.where(active[:, None], values, 0.0)
        logits.scatter_add_(1, self._ids[rows], values)
