"""Keeps interruptions from getting lost.

A signal's handler raises wherever the main thread is. In a `__del__` or a callback of a weak reference Python reports
the exception and goes on: Ctrl-C would be a traceback on the terminal, and the work would continue.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_AGAIN_S = 0.01
_SIGNAL_OF = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}


@contextmanager
def kept_interruptions() -> Iterator[None]:
    """Raises a KeyboardInterrupt or SystemExit that Python would drop again by its signal, within the context."""
    before = sys.unraisablehook

    def again(dropped: sys.UnraisableHookArgs) -> None:
        number = _SIGNAL_OF.get(dropped.exc_type)
        if number is None:
            before(dropped)
        else:
            timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()  # here it would be dropped once more

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM unwind this process within the context, which removes its temporary folders."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with kept_interruptions():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
