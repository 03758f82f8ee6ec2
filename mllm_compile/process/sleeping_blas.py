"""Has the threads of numpy's OpenBLAS sleep as soon as they are made.

Importing numpy makes one for each core. Each then waits for work by asking for it, for a tenth of a second of CPU time
(docs/lab/start.md). An engine has no work for them, and where cores are few or a quota counts, they take a start's own
time. With the shortest wait they are there as before, and a product wakes them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# The power of two of clock ticks that a thread asks for; OpenBLAS takes 4 to 30 (driver/others/blas_server.c).
VARIABLE = "OPENBLAS_THREAD_TIMEOUT"
_SHORTEST = "4"


@contextmanager
def sleeping_blas() -> Iterator[None]:
    """Is around a first import of numpy, which reads the variable; afterwards it is gone. Nothing happens where the
    caller has set it, or numpy is there."""
    if "numpy" in sys.modules or VARIABLE in os.environ:
        yield
        return
    os.environ[VARIABLE] = _SHORTEST
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
