"""The memory of images' features on the device: a fixed number of rows; the least recently used make room.

A step's images have to be there at once; whatever else fits is kept for the next request with the same image. Used by
one thread, in the order of steps: rows that a step reads are written anew only behind it on the device. W numbers of a
feature, those for deeper layers included.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable

import numpy as np
import torch

from mllm_compile.runtime.media.tower import MAX_FEATURES

Key = Hashable


class FeaturePool:
    """See the module's header.

    Attributes:
        rows: [capacity + 1, W] on the device; row 0 is zeros, for tokens that take no feature.
    """

    def __init__(self, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            capacity: features.
        """
        self.rows = torch.zeros(capacity + 1, width, dtype=dtype, device=device)
        self._free = np.arange(capacity, 0, -1)
        self._num_free = capacity
        self._images: OrderedDict[Key, np.ndarray] = OrderedDict()  # to their rows, the one used longest ago first

    @staticmethod
    def capacity_for(max_num_batched_tokens: int, max_model_len: int) -> int:
        """Features of the images of two steps, or of the largest image where that has more."""
        return max(min(2 * max_num_batched_tokens, MAX_FEATURES), min(max_model_len, MAX_FEATURES))

    @property
    def num_free(self) -> int:
        """Rows that belong to no image."""
        return self._num_free

    def find(self, key: Key) -> np.ndarray | None:
        """The rows [F] of an image; None: it is not there. It counts as used now."""
        rows = self._images.get(key)
        if rows is not None:
            self._images.move_to_end(key)
        return rows

    def place(self, key: Key, count: int, needed: Collection[Key]) -> np.ndarray:
        """Rows [count] for the features of a missing image; other images that are not `needed` make room.

        Raises:
            RuntimeError: the needed ones leave no room, which the scheduler sees to.
        """
        unneeded = (other for other in list(self._images) if other not in needed)
        while self._num_free < count:
            other = next(unneeded, None)
            if other is None:
                raise RuntimeError(
                    f"internal error: an image of {count} features finds {self._num_free} free rows beside the "
                    f"{len(needed)} images of its step"
                )
            self.forget(other)
        self._num_free -= count
        rows = self._free[self._num_free : self._num_free + count].copy()
        self._images[key] = rows
        return rows

    def forget(self, key: Key) -> None:
        """Gives the rows of an image back."""
        rows = self._images.pop(key)
        self._free[self._num_free : self._num_free + rows.size] = rows
        self._num_free += rows.size
