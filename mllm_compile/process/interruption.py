"""Keeps interruptions from getting lost.

A signal's handler raises wherever the main thread is. In a `__del__` or a callback of a weak reference Python reports
the exception and goes on: Ctrl-C would be a traceback on the terminal, and the work would continue.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType

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
            # Here it would be dropped once more.
            threading.Thread(target=_send_after, args=(again.__code__, number), daemon=True).start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _send_after(code: CodeType, number: signal.Signals) -> None:
    """Sends this process a signal once the main thread no longer runs `code`."""
    while True:
        time.sleep(_AGAIN_S)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is None:
            os.kill(os.getpid(), number)
            return


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM unwind this process within the context, which removes its temporary folders."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with kept_interruptions():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
