"""A stored number of KV pages holds for the same settings with as much memory free, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mllm_compile.engine.start.memory_plan import MemoryPlan, situation
from mllm_compile.runtime.runner_config import RunnerConfig
from tests.runtime.runner_cases import DEFAULTS

GIB = 1 << 30
NOW = MemoryPlan({"page_size": "16"}, free_bytes=130 * GIB, total_bytes=140 * GIB)
STORED = replace(NOW, num_pages=1000).to_json()


def test_the_same_situation_gives_the_stored_pages():
    assert NOW.pages_from(STORED) == 1000
    assert replace(NOW, free_bytes=129 * GIB).pages_from(STORED) == 1000, "a driver's noise"


@pytest.mark.parametrize("free_gib", [100, 128, 132])
def test_other_free_memory_is_measured_again(free_gib):
    assert replace(NOW, free_bytes=free_gib * GIB).pages_from(STORED) is None


def test_other_settings_are_measured_again():
    assert replace(NOW, settings={"page_size": "32"}).pages_from(STORED) is None


@pytest.mark.parametrize("stored", [None, [], {}, {"settings": {}}])
def test_what_was_never_stored_is_measured(stored):
    assert NOW.pages_from(stored) is None


def test_every_setting_but_the_pages_is_in_a_plan_and_a_cpu_has_none():
    config = RunnerConfig(dtype=torch.float32, runtime=replace(DEFAULTS, max_running_requests=2), num_pages=7)
    plan = situation(config)
    assert "max_running_requests=2" in plan.settings["runtime"]
    assert "num_pages" not in plan.settings
    assert plan.free_bytes == 0
    assert plan.pages_from(replace(plan, num_pages=7).to_json()) is None
