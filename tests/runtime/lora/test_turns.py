"""Work of a load that lets steps run: how often it gives Python's lock away."""

from __future__ import annotations

from types import SimpleNamespace

from mllm_compile.runtime.lora import turns


def test_the_lock_is_given_away_once_a_turn_and_not_ahead_of_each_item(monkeypatch):
    now, given = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=given.append)
    monkeypatch.setattr(turns, "time", clock)
    seen = []
    for item in turns.in_turns(range(1000)):
        seen.append(item)
        now[0] += turns.TURN_SECONDS / 10
    assert seen == list(range(1000))
    assert set(given) == {0} and 80 <= len(given) <= 100
    given.clear()
    for _ in turns.in_turns(range(5)):
        now[0] += 2 * turns.TURN_SECONDS
    assert len(given) == 4, "between two items where each takes longer than a turn"
