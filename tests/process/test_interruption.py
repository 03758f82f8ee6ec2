"""An interruption that comes where Python drops what is raised is raised again; SIGTERM unwinds."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from mllm_compile.process.interruption import ended_by_sigterm, kept_interruptions


@pytest.fixture(autouse=True)
def sigint_interrupts() -> Iterator[None]:
    """A process that was started in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class InterruptedInItsEnd:
    """A signal that arrives in a finalizer."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


def end_one(number: signal.Signals) -> None:
    InterruptedInItsEnd(number)
    time.sleep(60)


def test_an_interrupt_in_a_finalizer_is_not_lost():
    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), kept_interruptions():
        end_one(signal.SIGINT)
    assert sys.unraisablehook is hook


def test_sigterm_unwinds_also_out_of_a_finalizer():
    handler, done = signal.getsignal(signal.SIGTERM), []
    for arrive in (lambda: signal.raise_signal(signal.SIGTERM), lambda: end_one(signal.SIGTERM)):
        with pytest.raises(SystemExit), ended_by_sigterm():
            try:
                arrive()
            finally:
                done.append("cleaned")
    assert done == ["cleaned"] * 2
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_signal_is_not_sent_again_while_its_hook_runs(monkeypatch):
    class SlowThread(threading.Thread):
        def start(self) -> None:
            super().start()
            time.sleep(0.05)  # five times what it waits

    monkeypatch.setattr(threading, "Thread", SlowThread)
    monkeypatch.setattr(threading, "Timer", type("SlowTimer", (SlowThread, threading.Timer), {}))
    with pytest.raises(KeyboardInterrupt), kept_interruptions():
        end_one(signal.SIGINT)
