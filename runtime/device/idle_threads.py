"""Ends OpenMP's idle threads, which slow the busy ones down.

Each thread that has run a parallel region keeps a team for the next one. As soon as a process has more of these threads
than the machine has cores, libgomp lets them sleep between regions where they would have spun, and to wake them takes
longer than a region of a small model: beside the team that loading leaves behind a token of the embedded model takes
4.7 ms, and 1.7 without it (two cores). So a thread that loads ends its team before another one serves.
"""

from __future__ import annotations

import ctypes

import torch

_SOFT = 1  # omp_pause_soft: the next parallel region makes a new team (OpenMP 5.0, 3.2.44)


def end_idle_threads() -> None:
    """Ends the calling thread's; does nothing where torch's OpenMP has no such call."""
    linked = ctypes.CDLL(torch._C.__file__)  # what it is linked with is looked through too
    pause = getattr(linked, "omp_pause_resource_all", None)
    if pause is not None:
        pause(_SOFT)
