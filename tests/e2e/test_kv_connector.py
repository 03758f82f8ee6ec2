"""Engines share pages by a store of others, and lose nothing where it fails."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.engine.start import assemble
from mllm_compile.errors import ConfigError, DeviceMemoryError
from mllm_compile.process.timeline import Timeline
from mllm_compile.server.backend.process import _hello
from tests.kv_connectors import broken_stores
from tests.sample import slow_but_a_sample
from tests.tiny_model import engine_of_pages, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
PROMPTS = [[first, *range(3, 90)] for first in range(4)]
EXAMPLE = "examples.folder_store.FolderStore"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def served(cache: Path, store: str, options: dict[str, Any], timeout_s: float = 60.0, **sections: Any) -> Engine:
    transfer = {"kv_connector": store, "kv_connector_extra_config": options, "trust_local_code": True}
    transfer["timeout_s"] = timeout_s
    runtime = {"kv_offloading_size": 0.05, "kv_offloading_min_gain": 0, "kv_transfer_config": transfer}
    config = tiny_config(cache, runtime=runtime | {"max_model_len": 128}, compile={"backend": "eager"}, **sections)
    return engine_of_pages(config, 60)


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = engine.generate(prompts, GREEDY)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.token_ids for output in outputs]


def test_a_package_that_is_missing_is_told_ahead_of_a_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "load_or_compile", lambda *_: pytest.fail("it was told too late"))
    with pytest.raises(ConfigError, match=r"names nowhere\.at\.all, and there is no package nowhere here"):
        served(tmp_path, "nowhere.at.all.Store", {})


def test_an_engine_finds_what_another_one_has_stored_and_computes_what_is_damaged(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"folder": str(tmp_path)}
    with served(cache, EXAMPLE, options) as first:
        expected = answers(first)
    with served(cache, EXAMPLE, options) as second:
        outputs = second.generate(PROMPTS, GREEDY)
        _, below = second.stats().tiers
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.num_disk_tokens for output in outputs) == below.hit_tokens > 0
    assert (below.name, below.failed_loads) == ("connector", 0)
    for path in tmp_path.glob("*/*p"):
        damaged = bytearray(path.read_bytes())
        damaged[-9] ^= 1
        path.write_bytes(damaged)
    with served(cache, EXAMPLE, options) as last:
        assert answers(last) == expected
        assert last.stats().tiers[1].failed_loads > 0
    assert "came back damaged" in caplog.text


def test_drafts_behind_pages_of_a_store_change_no_answer(cache: Path) -> None:
    """As vLLM's issue 53505 tells of wrong answers."""
    repeated = [[first, *[11, 12, 13, 14] * 21] for first in range(4)]
    broken_stores.SHARED.clear()
    store = "tests.kv_connectors.broken_stores.MemoryStore"
    with served(cache, store, {}) as plain:
        expected = answers(plain, repeated)
    speculative = {"method": "suffix", "num_speculative_tokens": 3}
    for _ in range(2):
        with served(cache, store, {}, speculative=speculative) as drafting:
            assert answers(drafting, repeated) == expected
            hits = drafting.stats().tiers[1].hit_tokens
            assert answers(drafting, repeated) == expected
            assert drafting.stats().drafts > 0
    assert hits > 0, "the second engine begins behind what the first has stored"


@pytest.mark.parametrize("at", slow_but_a_sample(["lookup", "load", "store"], 1))
def test_a_store_that_hangs_is_left_and_requests_are_answered(
    cache: Path, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken_stores.SHARED.clear()
    with served(cache, "tests.kv_connectors.broken_stores.MemoryStore", {}) as first:
        expected = answers(first)
    with served(cache, "tests.kv_connectors.broken_stores.Hangs", {"at": at}, timeout_s=3.0) as engine:
        assert answers(engine) == expected
        engine.flush_prefix_cache()
        assert answers(engine) == expected
    assert f"{at} took over 3 s" in caplog.text
    assert threading.active_count() < 60


def test_a_store_that_refuses_is_a_line_and_one_that_is_none_ends_the_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Timeline, "announce", lambda _, text: said.append(text))
    with served(cache, "tests.kv_connectors.broken_stores.Refuses", {}) as engine:
        assert [tier.name for tier in engine.stats().tiers] == ["host"]
        answers(engine)
    assert "runtime.kv_transfer_config is not used: no server at 10.0.0.1:7" in said
    with pytest.raises(ConfigError, match="has no class Nothing"):
        served(cache, "tests.kv_connectors.broken_stores.Nothing", {})


def test_a_start_that_fails_lets_the_folder_behind_the_memory_go(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = {"kv_offloading_disk_path": str(tmp_path / "kv"), "kv_offloading_disk_size": 0.05, "max_model_len": 128}

    def started(size: float) -> Engine:
        sections = {"runtime": runtime | {"kv_offloading_size": size}, "compile": {"backend": "eager"}}
        return engine_of_pages(tiny_config(cache, **sections), 60)

    def refused(*_: object) -> None:
        raise ConfigError("no end of answers")

    threads = set(threading.enumerate())
    with pytest.raises(DeviceMemoryError, match="kv_offloading_size needs"):
        started(60_000.0)
    with monkeypatch.context() as patched, pytest.raises(ConfigError, match="no end of answers"):
        patched.setattr("mllm_compile.engine.start.assemble.ends_of_answers", refused)
        started(0.05)
    assert not [one for one in set(threading.enumerate()) - threads if one.name.startswith("mllm-tier")]
    with started(0.05) as engine:
        assert [tier.name for tier in engine.stats().tiers] == ["host", "disk"]


def test_clients_are_not_told_what_a_store_is_reached_with(cache: Path) -> None:
    with served(cache, "tests.kv_connectors.broken_stores.MemoryStore", {"password": "quiet"}) as engine:
        told = _hello(engine, Timeline(), (0, 0)).config
    assert told["runtime"]["kv_transfer_config"]["kv_connector"].endswith("MemoryStore")
    assert "quiet" not in json.dumps(told)
