"""The runtime's facts of an encoder-decoder's sources, as a program stores them; free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """
    Attributes:
        max_length: most states of a source: tokens of a text, or all that a window of sound has.
        vocab_size: ids that the encoder knows; 0: it reads sounds.
        bins, frames: of a window of sound; 0: it reads texts.
    """

    max_length: int
    vocab_size: int = 0
    bins: int = 0
    frames: int = 0

    @property
    def is_sound(self) -> bool:
        return self.bins > 0
