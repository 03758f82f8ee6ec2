"""Which cases a run takes: others with every commit, and the same when it is run again.

MLLM_HOSTILE_SEED repeats another run's cases, MLLM_HOSTILE_CASE=NUMBER one of them alone.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def seed() -> str:
    """The commit's hash, or what MLLM_HOSTILE_SEED says; "none" where there is no repository."""
    if wanted := os.environ.get("MLLM_HOSTILE_SEED"):
        return wanted
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def cases(kind: str, count: int) -> Iterator[tuple[int, random.Random]]:
    """`count` numbered sources of chance."""
    one = os.environ.get("MLLM_HOSTILE_CASE")
    for number in range(count) if one is None else [int(one)]:
        yield number, random.Random(f"{seed()} {kind} {number}")


def repeat_with(test: str, number: int) -> str:
    """What a failure tells to run."""
    return f"repeat it: MLLM_HOSTILE_SEED={seed()} MLLM_HOSTILE_CASE={number} pytest tests/hostile -k {test}"
