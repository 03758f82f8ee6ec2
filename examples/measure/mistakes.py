"""How scripts of this folder tell a user's mistake: in one line, as the command line does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mllm_compile.errors import MllmError


def positive(text: str) -> int:
    """A number of requests, tokens or the like, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of at least 1")
    return int(text)


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Ends the process with the error's message where there would be a traceback."""
    try:
        yield
    except MllmError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
