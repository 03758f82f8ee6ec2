"""Rows of several sounds one after another, and convolutions that see those of one sound alone.

Shape legend: C chunks, R rows of all of them, D width, K width of a kernel.
"""

from __future__ import annotations

import torch

FILLING = -1  # the number of rows behind a sound's end


def sounds_of_rows(sounds: torch.Tensor, edges: torch.Tensor, rows: int) -> torch.Tensor:
    """The number of each row's sound [C, rows], or FILLING.

    Args:
        sounds: [C] int64, of each chunk, from 0 on.
        edges: [C] int64, rows of each chunk that are its sound's.
    """
    is_there = torch.arange(rows, device=sounds.device) < edges[:, None]
    return torch.where(is_there, sounds[:, None], FILLING)


def convolve_within(hidden: torch.Tensor, weight: torch.Tensor, left: int, sounds: torch.Tensor) -> torch.Tensor:
    """Convolves each number of rows [R, D] along rows by itself: zeros are what it sees of other sounds.

    Args:
        weight: [D, 1, K], as a Conv1d of D groups has it.
        left: rows that it sees before a row.
        sounds: [R], of each row.
    """
    count, width = hidden.shape[0], weight.shape[-1]
    around = torch.nn.functional.pad(hidden, (0, 0, left, width - 1 - left))
    sounds_around = torch.nn.functional.pad(sounds, (left, width - 1 - left), value=FILLING - 1)
    convolved = torch.zeros_like(hidden)
    for place in range(width):
        is_own = sounds_around.narrow(0, place, count) == sounds
        seen = torch.where(is_own[:, None], around.narrow(0, place, count), 0)
        convolved = convolved + seen * weight[:, 0, place]
    return convolved
