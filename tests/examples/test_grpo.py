"""The example of a policy gradient raises its reward on the embedded model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.tiny_model import TINY

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"


@pytest.mark.slow
def test_twenty_steps_raise_the_reward(eager_cache: Path) -> None:
    config = {
        "model": {"path": str(TINY), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "deterministic": True, "max_model_len": 128},
        "cache": {"dir": str(eager_cache)},
    }
    rewards = runpy.run_path(str(EXAMPLE))["train"](config, 20)
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert last > first + 0.02
