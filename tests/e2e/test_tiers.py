"""An engine with memory behind its KV cache gives the tokens of one without, for every kind of cache.

Tiny random models on a CPU, served with so few pages that prefixes go and come back, and requests are preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.config.schema import EngineConfig
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample
from tests.tiny_model import engine_of_pages

PAGE, MOST = 4, 96
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@dataclass(frozen=True)
class Kind:
    """A model, and the keys that it is served with."""

    architecture: str
    runtime: dict[str, Any]
    holds: str

    def __str__(self) -> str:
        return "-".join([self.architecture, *map(str, self.runtime.values())])


KINDS = (
    Kind("qwen3", {}, "pages"),
    Kind("qwen3", {"kv_cache_dtype": "fp8_e4m3"}, "pages"),
    Kind("qwen3_5_text", {}, "states"),
    Kind("mamba2", {}, "states"),
    Kind("lfm2", {}, "states"),
    Kind("qwen3_next", {}, "states"),
    Kind("deepseek_v3", {}, "pages"),
    Kind("gemma3_text", {}, "pages"),
    Kind("mistral", {}, "pages"),
    Kind("gpt_oss", {}, "pages"),
    Kind("mixtral", {}, "pages"),
    Kind("gpt2", {}, "pages"),
    Kind("falcon", {}, "pages"),
    Kind("llama", {"deterministic": True}, "pages"),
)


@dataclass(frozen=True)
class Served:
    kind: Kind
    folder: Path

    def engine(self, num_pages: int | None = None, **runtime: Any) -> Engine:
        sizes = {"device": "cpu", "max_model_len": MOST, "max_num_batched_tokens": 32, "page_size": PAGE}
        sizes |= {"max_running_requests": 4} | self.kind.runtime | runtime
        sections = {
            "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": sizes,
            "cache": {"dir": str(self.folder / "cache")},
        }
        return engine_of_pages(EngineConfig.from_dict(sections), num_pages)


@pytest.fixture(scope="module", params=slow_but_a_sample(KINDS, 1), ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp(request.param.architecture)
    config = tiny_config(request.param.architecture, eos_token_id=None, bos_token_id=None)
    save_tiny_model(config, folder / "model")
    return Served(request.param, folder)


def turns_of(chance: Random, num_turns: int = 24, num_beginnings: int = 5) -> list[list[int]]:
    """Prompts that begin alike, as turns of sessions do."""
    texts = [[chance.randrange(FIRST_SPECIAL_TOKEN) for _ in range(MOST)] for _ in range(num_beginnings)]
    turns = []
    for _ in range(num_turns):
        text = chance.choice(texts)
        own = [chance.randrange(FIRST_SPECIAL_TOKEN) for _ in range(chance.randrange(1, 8))]
        turns.append(text[: chance.randrange(1, MOST - 16)] + own)
    return turns


def tokens_of(engine: Engine, prompts: list[list[int]], at_once: int) -> list[list[int]]:
    answers = []
    for start in range(0, len(prompts), at_once):
        answers += [output.token_ids for output in engine.generate(prompts[start : start + at_once], GREEDY)]
    return answers


def test_turns_of_sessions_get_the_tokens_of_an_engine_without_tiers(served: Served) -> None:
    turns = turns_of(Random(str(served.kind)))
    with served.engine() as plain:
        expected = tokens_of(plain, turns, 1)
    with served.engine(40, kv_offloading_size=0.002, kv_offloading_min_gain=0) as tiered:
        assert tokens_of(tiered, turns, 6) == expected
        (host,) = tiered.stats().tiers
        assert host.hit_tokens > 0
        assert host.failed_loads == 0
        if served.kind.holds == "states":
            assert host.states > 0
        again = tokens_of(tiered, turns, 3)
    assert again == expected


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "-" in path.name]


def test_prefixes_survive_a_restart_on_disk_and_damaged_ones_are_computed(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = turns_of(Random(7), num_turns=8)
    disk = {"kv_offloading_size": 0.002, "kv_offloading_min_gain": 0, "kv_offloading_disk_size": 0.01}
    disk["kv_offloading_disk_path"] = str(tmp_path / "tier")
    with served.engine(40, **disk, kv_offloading_write_policy="write_back") as first:
        expected = tokens_of(first, turns, 4)
        with served.engine(40, **disk) as second:  # the folder is the first one's
            assert [tier.name for tier in second.stats().tiers] == ["host"]
            assert tokens_of(second, turns[:1], 1) == expected[:1]
    assert files_of(tmp_path)
    with served.engine(40, **disk) as again:
        assert tokens_of(again, turns, 4) == expected
        _, below = again.stats().tiers
        assert below.hit_tokens > 0
        assert below.failed_loads == 0
    for path in files_of(tmp_path):
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        path.write_bytes(damaged)
    with served.engine(40, **disk) as last:
        assert tokens_of(last, turns, 4) == expected
        assert last.stats().tiers[1].failed_loads > 0
    assert "is damaged" in caplog.text
