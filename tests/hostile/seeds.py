"""Cases of a run: others with every commit, and the same when it is run again (tests/sample.py).

MLLM_TEST_SEED repeats another run's cases, MLLM_HOSTILE_CASE=NUMBER one of them alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

from tests.sample import VARIABLE, seed


def cases(kind: str, count: int) -> Iterator[tuple[int, random.Random]]:
    """`count` numbered sources of chance."""
    one = os.environ.get("MLLM_HOSTILE_CASE")
    for number in range(count) if one is None else [int(one)]:
        yield number, random.Random(f"{seed()} {kind} {number}")


def repeat_with(test: str, number: int) -> str:
    """The command that a failure names."""
    return f"repeat it: {VARIABLE}={seed()} MLLM_HOSTILE_CASE={number} pytest tests/hostile -k {test}"
