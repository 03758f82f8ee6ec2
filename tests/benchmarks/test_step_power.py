"""The script that reads a GPU's power: what it makes of readings, with a GPU that is not there."""

from __future__ import annotations

import argparse
import re

import pytest

from benchmarks.steps.step_power import Drawn, report

PREFILL_S, PREFILL_WATTS = 0.5, 700.0
STEP_S, STEP_WATTS = 0.01, 400.0


class FakeGpu:
    """An engine and a meter: 0.5 s of prefill at 700 W, then steps of 10 ms at 400."""

    def __init__(self) -> None:
        self.seconds = self.joules = 0.0

    def generate(self, prompts, params, progress) -> None:
        steps = params.max_tokens - 1
        self.seconds += PREFILL_S + steps * STEP_S
        self.joules += PREFILL_S * PREFILL_WATTS + steps * STEP_S * STEP_WATTS

    def measure(self, work, repeats, skipped_s=0.0) -> Drawn:
        seconds, joules = self.seconds, self.joules
        for _ in range(repeats):
            work()
        return Drawn(self.seconds - seconds, self.joules - joules, 1500 if skipped_s == PREFILL_S else 1400)


@pytest.mark.parametrize("tokens", [2, 129])
def test_decode_steps_are_what_more_tokens_take_beyond_one(tokens, capsys):
    gpu = FakeGpu()
    report(gpu, gpu, 8, argparse.Namespace(prompt=100, tokens=tokens, seconds=3.0))
    rows = [re.split(r" *\| *", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["8", "prefill of 100", "500.000", "700", "1400", "437.500"],
        ["8", "decode step", "10.000", "400", "1500", "500.000"],
    ]
    assert gpu.seconds > 6.0, "three seconds of each"
