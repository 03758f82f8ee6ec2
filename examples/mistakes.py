"""How a script of this folder tells a user's mistake: in one line, as the command line does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mllm_compile.errors import MllmError


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Ends the process with the error's message where there would be a traceback."""
    try:
        yield
    except MllmError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
