"""The script that takes a first token apart, on a machine without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.steps import first_token_parts as script
from mllm_compile import Engine
from tests.tiny_model import tiny_config


@pytest.mark.parametrize(("cached", "behind"), [(None, ""), (160, " behind 160")])
def test_the_parts_of_the_host_are_counted_and_timed(
    eager_cache: Path, monkeypatch, capsys, cached: int | None, behind: str
) -> None:
    clock = script.Clock()
    for _, owner, method in script.PARTS:
        timed = clock.around(f"{owner.__name__}.{method}", getattr(owner, method))
        monkeypatch.setattr(owner, method, timed)
    asked = argparse.Namespace(prompt=24, prompts=2, repeats=3, cached=cached)
    with Engine(tiny_config(eager_cache, compile={"backend": "eager"})) as engine:
        script.report(engine, clock, asked)
        hits = engine.stats().prefix_hit_tokens
    calls = script.WARM_UPS + asked.repeats
    assert hits >= 128 * asked.prompts * calls if cached else hits == 0
    out = capsys.readouterr().out
    assert f"2 prompts of 24 tokens{behind}: first token after" in out
    assert clock.calls["StepRunner.submit"] >= 3
    inside = clock.seconds["Planner.plan"] + clock.seconds["ModelRunner.forward"]
    assert 0 < inside <= clock.seconds["StepRunner.submit"]


def test_a_part_that_fails_is_timed_as_well() -> None:
    clock = script.Clock()

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        clock.around("part", fail)()
    assert clock.calls == {"part": 1}
