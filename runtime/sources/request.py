"""The source of one request, which the encoder reads; free of torch.

Shape legend: E states of a source, as many as its tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.sources.images import SeenImages

_KEY_BYTES = 8


@dataclass(frozen=True, eq=False)
class RequestSource:
    """A source.

    Attributes:
        length: E.
        digest: of all that the encoder reads: sources alike have the same keys and values.
        ids: [E] int64 of a text; None: it is a sound.
        window: [bins * frames] float32 of a sound.
        images: that layers of its text attend to, of a model that is no encoder-decoder.
    """

    length: int
    digest: bytes
    ids: np.ndarray | None = None
    window: np.ndarray | None = None
    images: SeenImages | None = None

    @classmethod
    def of_text(cls, ids: np.ndarray) -> RequestSource:
        """Args: ids: [E] int64."""
        return cls(ids.size, hashlib.sha256(b"text" + ids.tobytes()).digest(), ids=ids)

    @classmethod
    def of_sound(cls, window: np.ndarray, length: int) -> RequestSource:
        """Args: window: [bins * frames] float32; length: E."""
        window = np.ascontiguousarray(window, dtype=np.float32)
        return cls(length, hashlib.sha256(b"sound" + window.tobytes()).digest(), window=window)

    @classmethod
    def of_images(cls, images: SeenImages) -> RequestSource:
        return cls(images.length, images.digest, images=images)

    def keys(self, count: int) -> np.ndarray:
        """[count] int64 below zero by which the prefix cache knows its pages: 63 bits of a hash each."""
        stream = hashlib.shake_256(b"pages" + self.digest).digest(_KEY_BYTES * count)
        return -1 - (np.frombuffer(stream, dtype="<i8") & np.int64(2**63 - 1))

    def decoder_keys(self, ids: np.ndarray) -> np.ndarray:
        """The numbers [n] by which the prefix cache knows the decoder's tokens `ids`: the first is of this source."""
        keys = ids.copy()
        keys[:1] = -1 - (int.from_bytes(hashlib.sha256(self.digest + keys[:1].tobytes()).digest()[:8], "little") >> 1)
        return keys
