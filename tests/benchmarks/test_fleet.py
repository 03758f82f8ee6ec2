"""The simulator of several engines: its costs are the laboratory's, its routers the real ones."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from benchmarks.fleet import __main__ as fleet
from benchmarks.fleet.engine import SimulatedEngine
from benchmarks.fleet.rules import rule_of, text_of
from benchmarks.fleet.simulation import Figures, Simulation
from benchmarks.fleet.step_costs import StepCosts
from benchmarks.server.agent_trace import PRESETS, Generator
from mllm_compile.runtime.schedule.step_cost import StepLoad
from mllm_compile.server.replicas.text import Text


def cells(out: str) -> dict[str, list[float]]:
    """By rule: cached %, seconds to the first token at three percentiles, …"""
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| s") or "least" in line]
    return {name: [float(cell.rstrip("s% ").replace(",", "")) for cell in row] for name, *row in rows}


def test_agents_find_their_prefixes_behind_the_served_rule_and_not_behind_least_loaded(monkeypatch, capsys):
    work = "--engines 4 --sessions 25 --at-once 8 --kv-tokens 250000 --fold 64 --rules served,least-loaded --parts 2"
    monkeypatch.setattr(sys, "argv", ["fleet", *work.split()])
    fleet.main()
    found = cells(capsys.readouterr().out)
    cached, first = ({name: row[which] for name, row in found.items()} for which in (0, 2))
    assert cached["served"] > 90 > cached["least-loaded"] + 10
    assert first["served"] < first["least-loaded"]


def test_the_figures_of_several_runs_are_those_of_all_calls():
    one = Figures([1.0, 2.0], [3.0], 100, 90, 10, busy_s=[1.0, 3.0], clock_s=5.0)
    other = Figures([4.0], [6.0], 300, 0, 30, busy_s=[4.0, 2.0], clock_s=7.0)
    both = Figures.of_all((one, other))
    assert both == Figures([1.0, 2.0, 4.0], [3.0, 6.0], 400, 90, 40, busy_s=[3.0, 7.0], clock_s=12.0)


def test_a_run_tells_at_most_twenty_times_how_far_it_is():
    told: list[tuple[int, int]] = []
    engines = [SimulatedEngine(StepCosts.measured(), 250_000, 2 * PRESETS["codex"]["limit"], 64)]
    generator = Generator(PRESETS["codex"], 1, 1 / 64, 1.0, 3600.0)
    rule = rule_of("round-robin", 1, 250_000, 2)

    def tell(over: int, figures: Figures) -> None:
        told.append((over, len(figures.call_s)))

    figures = Simulation(engines, rule, generator, 41, 8, tell).run()
    assert [over for over, _ in told] == list(range(3, 41, 3))
    calls = [count for _, count in told]
    assert calls == sorted(calls) and calls[0] > 0 and calls[-1] < len(figures.call_s)


def test_more_parts_than_sessions_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fleet", "--sessions", "1", "--parts", "2"])
    with pytest.raises(SystemExit):
        fleet.main()
    assert "there are 1 sessions; give at most one part for each" in capsys.readouterr().err


def test_costs_give_back_what_was_measured():
    costs = StepCosts.measured()
    tpot = costs.decodes_ms(StepLoad(64, int(64 * 576.5)), 1)
    assert tpot == pytest.approx(5.427, abs=0.01)
    for tokens, ms in ((2000, 44.6), (8000, 203.1), (32000, 1177.3)):
        assert costs.prompts_ms(StepLoad(0, 0, tokens, tokens * tokens / 2), 1) == pytest.approx(ms, rel=0.03)
        folded = StepLoad(0, 0, tokens // 8, (tokens // 8) ** 2 / 2)
        assert costs.prompts_ms(folded, 8) == pytest.approx(ms, rel=0.03)


def test_an_engine_answers_as_told_and_finds_its_answers_again():
    engine = SimulatedEngine(StepCosts.measured(), kv_tokens=64_000, max_model_len=8192, fold=4)
    prompt, answer = np.arange(640), np.arange(9000, 9033)
    engine.add("one", prompt, answer)
    told = []
    while engine.begin_step() is not None:
        told.append(engine.end_step())
    assert told[0][0][0][0] == "one" and len(told) == 33, "the first token comes with the prompt"
    assert told[-1][1] == [("one", 0)]
    engine.add("two", np.concatenate((prompt, answer, np.arange(50))), answer)
    while engine.begin_step() is not None:
        (_, ended) = engine.end_step()
    assert ended == [("two", (640 + 32) // 16 * 16)]


def test_blocks_are_as_the_routers_own():
    ids = np.arange(1000, dtype=np.int64)
    other = ids.copy()
    other[500] = -1
    ours, theirs = text_of(ids, 128), text_of(other, 128)
    text = Text.of(ids.astype("<u4").tobytes())
    assert len(ours.blocks) == len(text.blocks) == 7
    assert [a == b for a, b in zip(ours.blocks, theirs.blocks, strict=True)] == [True] * 3 + [False] * 4
    assert (text.tail_bytes // 4, ours.tail_bytes // 8) == (104, 104)
