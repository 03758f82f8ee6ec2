"""What tests of the engine ask for, and how they wait for it."""

import threading
import time

from mllm_compile.runtime.sampling_params import SamplingParams


def params(**changes):
    return SamplingParams(**({"temperature": 0, "max_tokens": 8} | changes))


def until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


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
