"""The prompt with images or sounds that an engine takes: token ids, and what belongs to their placeholders.

Owns the data alone. processor.py makes it; the code that runs a model's vision program reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

MediaKind = Literal["image", "video", "audio"]
KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
NOUNS: dict[MediaKind, str] = {"image": "image", "video": "video", "audio": "sound"}


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One image, video or sound of a prompt.

    Attributes:
        kind: "image", "video" or "audio".
        start: index of the item's first feature token in the prompt's ids.
        length: positions from the first to the last feature token, both included; tokens between them that are no
            features (a video's times) count.
        digest: sha256 of the pixels or samples, and the processor's settings, 32 bytes. Items of one digest have the
            same features.
        tensors: what the processor gave for this item: pixel_values [patches, width] float32 and image_grid_thw
            [1, 3] int64, pixel_values_videos and video_grid_thw, pixel_values [1, channels, height, width], or
            input_features [windows, bins, frames] and a mask [windows, frames].
    """

    kind: MediaKind
    start: int
    length: int
    digest: bytes
    tensors: dict[str, np.ndarray]

    @property
    def end(self) -> int:
        """The index after the last feature token."""
        return self.start + self.length

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """A prompt with at least one item.

    Attributes:
        prompt_token_ids: N ids, each placeholder repeated once a feature.
        items: in the order of their places; they do not overlap.
        is_feature: [N] bool; True where a position takes a feature in place of its token's embedding.
    """

    prompt_token_ids: list[int]
    items: tuple[MediaItem, ...]
    is_feature: np.ndarray
