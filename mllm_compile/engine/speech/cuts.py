"""Cuts long sounds into windows, where they are quiet."""

from __future__ import annotations

import numpy as np

_FRAME_S = 0.02  # whose loudness is compared
_SEARCHED = 0.3  # the last part of a window in which a cut is looked for


def cut(samples: np.ndarray, longest: int, rate: int) -> list[tuple[int, np.ndarray]]:
    """(first sample, samples [≤ longest]) of each window, in order; a cut is in the quietest frame of its place.

    Args:
        samples: [N ≥ 1] float32.
    """
    windows, at, frame = [], 0, max(1, round(_FRAME_S * rate))
    while samples.size - at > longest:
        start = at + round(longest * (1 - _SEARCHED))
        part = samples[start : at + longest]
        count = max(1, part.size // frame)
        loudness = np.square(part[: count * frame].reshape(count, -1), dtype=np.float64).mean(axis=1)
        end = start + int(loudness.argmin()) * frame + frame // 2
        windows.append((at, samples[at:end]))
        at = end
    return [*windows, (at, samples[at:])]
