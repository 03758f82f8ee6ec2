"""The lengths that choose RoPE's frequencies, and the keys of the cache that they keep apart.

Where RoPE follows the length of a text (`longrope`, `dynamic`) a token is rotated by the frequencies for a length. That
is the length of its request's prompt, or the number of tokens up to itself, if larger. Transformers' generate does so
for a request alone. Keys that are cached stay as they are when a request grows, unless the model's own generate
computes them anew. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeLengths:
    """How a model's frequencies follow the length of a text.

    Attributes:
        boundary: up to this length they are short texts' frequencies.
        of_each_length: beyond it every length has frequencies of its own (`dynamic`); else all have the same ones
            (`longrope`).
        recomputes: a request that grows beyond the boundary is computed anew, with the frequencies of long texts.
    """

    boundary: int
    of_each_length: bool
    recomputes: bool

    def frequencies_of(self, length: int) -> int:
        """A number that is the same for lengths of the same frequencies."""
        if length <= self.boundary:
            return 0
        return length if self.of_each_length else self.boundary + 1

    def num_alike(self, rope_len: int, num_tokens: int) -> int:
        """The first of a request's tokens that are rotated by the frequencies for `rope_len`, its prompt's length, or
        for any length with the same ones. Later tokens use their own place."""
        if rope_len <= self.boundary:
            return min(num_tokens, self.boundary)
        return min(num_tokens, rope_len) if self.of_each_length else num_tokens
