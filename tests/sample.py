"""The part of a long list that `make test` runs: another one for each commit, the same one again for the same
commit."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
VARIABLE = "MLLM_TEST_SEED"


@cache
def seed() -> int:
    """MLLM_TEST_SEED where it is set; else made of the commit that is checked out; 0 where there is no git."""
    said = os.environ.get(VARIABLE)
    if said is not None:
        return int(said)
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(done.stdout.strip()[:8], 16)


def sample_of(everything: Sequence[T], count: int) -> list[T]:
    """`count` of them, or all where there are fewer."""
    return random.Random(seed()).sample(everything, min(count, len(everything)))


def slow_but_a_sample(everything: Iterable[Any], count: int) -> list[Any]:
    """All of them for `pytest.mark.parametrize`, slow but for `count`; a tuple is the values of several arguments."""
    listed = list(everything)
    taken = sample_of(range(len(listed)), count)
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=[] if index in taken else [pytest.mark.slow])
        for index, one in enumerate(listed)
    ]


def slow_but_a_sample_of_each(kinds: Callable[[Any], object], everything: Iterable[Any], count: int) -> list[Any]:
    """As `slow_but_a_sample`, with `count` of each kind; `kinds` says of what kind one is."""
    of_kind: dict[object, list[Any]] = {}
    for one in everything:
        of_kind.setdefault(kinds(one), []).append(one)
    return [parameter for listed in of_kind.values() for parameter in slow_but_a_sample(listed, count)]


def how_to_repeat() -> str:
    """For the message of a test that fails on its sample."""
    return f"{VARIABLE}={seed()} takes the same sample again"
