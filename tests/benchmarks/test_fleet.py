"""The simulator of several engines: its costs are the laboratory's, its routers the real ones."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.fleet import __main__ as fleet
from benchmarks.fleet.conversation import EMPTY, gone_on
from benchmarks.fleet.engine import Engine, Told
from benchmarks.fleet.flow_engine import FlowEngine
from benchmarks.fleet.kept_messages import KeptMessages
from benchmarks.fleet.rules import rule_of, text_of
from benchmarks.fleet.simulation import Figures, Simulation
from benchmarks.fleet.step_costs import StepCosts
from benchmarks.fleet.stepped_engine import SteppedEngine
from benchmarks.server.agent_trace import PRESETS, Generator
from mllm_compile.runtime.schedule.step_cost import StepLoad
from mllm_compile.server.replicas.text import Text
from tests.hang_guard import HANG_S

ROOT = Path(__file__).parents[2]


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
    engines = [FlowEngine(StepCosts.measured(), 250_000, 64)]
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


_POOL = """
import os, signal
from benchmarks.script import processes_of
with processes_of(2) as pool:
    pool.submit(os.getpid).result()
    print("begun", flush=True)
    pool.submit(signal.pause).result()
"""


def test_a_runs_processes_end_where_it_is_killed():
    with subprocess.Popen([sys.executable, "-c", _POOL], cwd=ROOT, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"begun\n"
        run.kill()
        assert run.communicate(timeout=HANG_S)[0] == b"", "its processes have its output until they end"


def test_costs_give_back_what_was_measured():
    costs = StepCosts.measured()
    tpot = costs.decodes_ms(StepLoad(64, int(64 * 576.5)), 1)
    assert tpot == pytest.approx(5.427, abs=0.01)
    for tokens, ms in ((2000, 44.6), (8000, 203.1), (32000, 1177.3)):
        assert costs.prompts_ms(StepLoad(0, 0, tokens, tokens * tokens / 2), 1) == pytest.approx(ms, rel=0.03)
        folded = StepLoad(0, 0, tokens // 8, (tokens // 8) ** 2 / 2)
        assert costs.prompts_ms(folded, 8) == pytest.approx(ms, rel=0.03)


def call(keep: int, prompt: int, answer: int, seed: int) -> dict[str, Any]:
    return {
        "keep": keep,
        "append": [{"seed": seed, "tokens": prompt}],
        "reply_seed": seed + 1,
        "out_tokens": answer,
    }


def happenings(engine: Engine) -> Iterator[tuple[float, Told]]:
    """All that happens until nothing is left to do."""
    while (now := engine.next_s) < math.inf:
        yield now, engine.go_on(now)


@pytest.mark.parametrize(
    "engine", [SteppedEngine(StepCosts.measured(), 64_000, 8192, 4), FlowEngine(StepCosts.measured(), 64_000, 4)]
)
def test_an_engine_answers_as_told_and_finds_its_answers_again(engine):
    one = gone_on(EMPTY, call(0, 640, 33, seed=1))
    engine.add(0.0, "one", one)
    told = list(happenings(engine))
    (first,) = [one for _, each in told for one in each.first]
    assert first[0] == "one" and 0 < first[1] < told[-1][0]
    assert [one for _, each in told for one in each.ended] == [("one", 0)]
    assert engine.busy_s == pytest.approx(told[-1][0])
    costs = StepCosts.measured()
    decodes_s = 4 * 32 * costs.decodes_ms(StepLoad(1, 656), 4) / 1e3
    assert told[-1][0] == pytest.approx(
        costs.prompts_ms(StepLoad(0, 0, 640, 640**2 / 2), 4) / 1e3 + decodes_s, rel=0.05
    )
    engine.add(9.0, "two", gone_on(one, call(2, 50, 33, seed=3)))
    assert [one for _, each in happenings(engine) for one in each.ended] == [("two", (640 + 33) // 16 * 16)]


@pytest.mark.parametrize("rule", ["served", "round-robin"])
def test_flow_tells_what_the_real_scheduler_tells(rule):
    costs, preset = StepCosts.measured(), PRESETS["codex"]

    def run(engines: list[Engine]) -> Figures:
        generator = Generator(preset, 3, 1 / 16, 1.0, 3600.0)
        return Simulation(engines, rule_of(rule, 2, 400_000, 8), generator, 12, 8, lambda *_: None).run()

    real = run([SteppedEngine(costs, 400_000, 2 * preset["limit"], 16) for _ in range(2)])
    flow = run([FlowEngine(costs, 400_000, 16) for _ in range(2)])
    assert (flow.prompt_tokens, flow.new_tokens) == (real.prompt_tokens, real.new_tokens)
    assert flow.cached_tokens == pytest.approx(real.cached_tokens, rel=0.02)
    assert sum(flow.busy_s) == pytest.approx(sum(real.busy_s), rel=0.05)
    found, wanted = (np.percentile(one.first_token_s, (50, 90)) for one in (flow, real))
    assert found == pytest.approx(wanted, rel=0.2)


def test_a_long_prompt_leaves_half_of_its_time_to_a_shorter_one():
    engine, costs = FlowEngine(StepCosts.measured(), 640_000, 4), StepCosts.measured()

    def prompt_s(tokens: int) -> float:
        return costs.prompts_ms(StepLoad(0, 0, tokens, tokens**2 / 2), 4) / 1e3

    engine.add(0.0, "long", gone_on(EMPTY, call(0, 8000, 1, seed=1)))
    engine.add(0.0, "longer", gone_on(EMPTY, call(0, 12_000, 1, seed=3)))
    engine.add(0.0, "short", gone_on(EMPTY, call(0, 500, 1, seed=5)))
    first = {name: now for now, told in happenings(engine) for name, _ in told.first}
    assert list(first) == ["short", "long", "longer"]
    # Beside the long one; then the three tokens that its first one stands for, which take a tenth of the time.
    assert first["short"] == pytest.approx(2 * prompt_s(500))
    assert first["long"] == pytest.approx(prompt_s(8000) + prompt_s(500), rel=0.03)


def test_a_call_without_room_waits_for_the_end_of_another_and_takes_what_nobody_uses():
    engine = FlowEngine(StepCosts.measured(), 40_000, 4)
    first = gone_on(EMPTY, call(0, 6000, 400, seed=1))
    engine.add(0.0, "one", first)
    engine.add(0.0, "two", gone_on(EMPTY, call(0, 6000, 10, seed=3)))
    told = [
        (what, name)
        for _, each in happenings(engine)
        for what, of in zip(each._fields, each, strict=True)
        for name, _ in of
    ]
    assert told == [("first", "one"), ("ended", "one"), ("first", "two"), ("ended", "two")]
    engine.add(engine.busy_s, "again", gone_on(first, call(2, 10, 10, seed=5)))
    ((_, cached),) = [one for _, each in happenings(engine) for one in each.ended]
    assert cached == (10_000 - 6010) // 16 * 16, "the second call has put the end of the first one out"


def test_kept_messages_are_a_prefix_of_what_was_used_last():
    rng, total = np.random.default_rng(5), 300
    cache, sizes = KeptMessages(total), {key: 1 + key % 7 for key in range(1, 400)}
    paths = [[1, 2], [1, 3]]  # of conversations
    used: list[list[int]] = []

    def ends(path: list[int]) -> list[int]:
        return np.cumsum([0] + [sizes[key] for key in path]).tolist()

    for number in range(4, 400):
        path = [*paths[rng.integers(len(paths))], number]
        count, tokens = cache.found(path, ends(path))
        assert ends(path)[max(count - 1, 0)] <= tokens <= ends(path)[count]
        held = ends(path)[-1] - tokens
        if count:
            cache.use(path[count - 1])
        if cache.available < held:
            cache.leave(path[count - 1]) if count else None
            paths = [*paths[:2], *paths[3:]]
            continue
        cache.reserve(held)
        held -= cache.put(path, ends(path), count)
        cache.free += held
        used.append(path)
        assert cache.found(path, ends(path)) == (len(path), ends(path)[-1])
        paths.append(path)
        if rng.random() < 0.8:
            cache.leave(used.pop(rng.integers(len(used)))[-1])
        assert 0 <= cache.free <= cache.available <= total
    for path in used:
        cache.leave(path[-1])
    assert cache.available == total, "all comes back"
    cache.reserve(total)
    assert cache.found([1, 2], ends([1, 2])) == (0, 0)


def test_blocks_are_as_the_routers_own():
    ids = np.arange(1000, dtype=np.int64)
    other = ids.copy()
    other[500] = -1
    ours, theirs = text_of(ids, 128), text_of(other, 128)
    text = Text.of(ids.astype("<u4").tobytes())
    assert len(ours.blocks) == len(text.blocks) == 7
    assert [a == b for a, b in zip(ours.blocks, theirs.blocks, strict=True)] == [True] * 3 + [False] * 4
    assert (text.tail_bytes // 4, ours.tail_bytes // 8) == (104, 104)
