"""How tests wait for what must happen. Nothing here measures: the limit is there so that a hang ends."""

from __future__ import annotations

import time
from collections.abc import Callable

# No test needs a tenth of it on a machine that is free; one that shares its cores with ten others may need half.
HANG_S = 300.0


def until(condition: Callable[[], object], what: str = "what a test waits for") -> None:
    """Returns when `condition` holds; what never comes true is a failure after HANG_S."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, f"{what} has not come true in {HANG_S:g} s"
        time.sleep(0.002)
