"""Agents' calls on an engine with the real scheduler and tiers, and a clock that takes measured times."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fleet.step_costs import StepCosts
from benchmarks.server.agent_trace import PRESETS, Generator
from benchmarks.steps.agents_simulation import SimulatedReplay
from benchmarks.steps.agents_speed import lru_share

KV_TOKENS, HOST_TOKENS = 50_000, 291_264


@pytest.mark.parametrize("writes_through", [False, True])
def test_agents_behind_memory_find_nearly_what_an_lru_of_both_sizes_has(writes_through):
    calls = Generator(PRESETS["agentx"], 1, 0.05, 0.05, 3.0).sessions(36)
    settings = {"kv_tokens": KV_TOKENS, "host_tokens": HOST_TOKENS, "writes_through": writes_through}
    replay = SimulatedReplay(calls, 12.0, StepCosts.measured(), **settings)
    replay.run()
    prompt, cached, *_ = (np.array(column) for column in zip(*replay.over, strict=True))
    assert len(replay.over) == len(replay.begun) > 100
    assert (replay.causes.tokens.total(), replay.causes.tokens["found"]) == (prompt.sum(), cached.sum())
    lost = sum(replay.causes.tokens[name] for name in ("given up", "in the host's memory, not loaded"))
    assert lost <= 0.01 * prompt.sum(), replay.causes.tokens
    assert cached.sum() >= 0.96 * lru_share(calls, replay.begun, KV_TOKENS + HOST_TOKENS) * prompt.sum()
