"""Requests of the engine's tests, and waits for their ends."""

import threading

from mllm_compile.runtime.sampling.params import SamplingParams
from tests.hang_guard import until as until


def params(**changes):
    return SamplingParams(**({"temperature": 0, "max_tokens": 8} | changes))


def start(function, *args):
    """Runs it in a thread; returns (thread, list that gets the result or the error)."""
    results = []

    def run():
        try:
            results.append(function(*args))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results
