"""The header that says whose a stored value is, and whether it is whole. A sum finds damage, not forgery."""

from __future__ import annotations

import struct

import numpy as np

from mllm_compile.runtime.tiers.place import Place

_FORMAT = 1
_MAGIC = b"MLLMKV01"
_HEADER = struct.Struct("<8sI4x16s16s16sQQQ16s24x")  # magic, format, key, parent, first, depth, bytes, sum, namespace
_MULTIPLIER = 0x9E3779B97F4A7C15
HEADER_BYTES = _HEADER.size


class Seal:
    """Makes headers; for any thread. The multipliers of its sum are kept.

    Args:
        namespace: 16 bytes of whose values they are; none where that is said elsewhere.
    """

    def __init__(self, namespace: bytes = b"") -> None:
        self._namespace = namespace
        self._multipliers = np.empty(0, dtype=np.uint64)

    def header(self, place: Place, data: np.ndarray) -> bytes:
        """The header of data [n] uint8, n a multiple of 8, at a place."""
        of_place = place.key, place.parent.ljust(16, b"\0"), place.first, place.depth
        return _HEADER.pack(_MAGIC, _FORMAT, *of_place, data.nbytes, self._sum(data), self._namespace)

    def _sum(self, data: np.ndarray) -> int:
        """64 bits: a change within one word is always found, others but for chance."""
        words = data.view(np.uint64)
        multipliers = self._multipliers
        if multipliers.size < words.size:
            with np.errstate(over="ignore"):
                mixed = np.arange(1, words.size + 1, dtype=np.uint64) * np.uint64(_MULTIPLIER)
                mixed ^= mixed >> np.uint64(29)
                multipliers = self._multipliers = mixed * np.uint64(2) + np.uint64(1)
        return int(np.dot(words, multipliers[: words.size]))
