"""Prefixes in the host's memory are there again after an engine's end, however it came."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server.kill_speed import engine_of
from mllm_compile import Engine, SamplingParams
from mllm_compile.process.timeline import Timeline
from mllm_compile.server.kept_memory import KeptMemory
from tests.hang_guard import until
from tests.server.harness import running
from tests.tiny_model import engine_of_pages, tiny_config

PROMPTS = [[first, *range(3, 100)] for first in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
RUNTIME = {"kv_offloading_size": 0.05, "kv_offloading_min_gain": 0, "max_model_len": 256}
CHILD = """
import sys
from pathlib import Path
from tests.e2e.test_tiers_survive import GREEDY, PROMPTS, served
with served(Path(sys.argv[1])) as engine:
    engine.generate(PROMPTS, GREEDY)
    print("answered", flush=True)
    while True:
        engine.generate([[9, *prompt] for prompt in PROMPTS], GREEDY)
        engine.flush_prefix_cache()
        engine.generate(PROMPTS, GREEDY)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptMemory]:
    memory = KeptMemory()
    for name, value in memory.environment(memory.descriptor).items():
        monkeypatch.setenv(name, value)
    yield memory
    memory.close()


@pytest.fixture
def memory_file() -> Iterator[Path]:
    path = Path("/dev/shm") / f"mllm-test-{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


def served(cache: Path, **runtime: object) -> Engine:
    return engine_of_pages(tiny_config(cache, runtime=RUNTIME | runtime, compile={"backend": "eager"}), 60)


def test_the_next_engine_finds_prefixes_and_one_of_other_numerics_does_not(
    cache: Path, kept: KeptMemory, tmp_path: Path
) -> None:
    with served(cache) as first:
        expected = [output.token_ids for output in first.generate(PROMPTS, GREEDY)]
    with served(cache) as second:
        outputs = second.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
        assert all(output.num_host_tokens > 0 for output in outputs)
        second.flush_prefix_cache()
    disk = {"kv_offloading_disk_path": str(tmp_path / "tier"), "kv_offloading_disk_size": 0.1}
    with served(cache, **disk) as third:  # of another secret
        outputs = third.generate(PROMPTS, GREEDY)
        assert not any(output.num_host_tokens for output in outputs)
    with served(cache, **disk) as fourth:
        outputs = fourth.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
        assert all(output.num_host_tokens > 0 and not output.num_disk_tokens for output in outputs)


def test_a_named_file_is_found_by_the_next_process_and_another_says_why_it_is_not_used(
    cache: Path, memory_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Timeline, "announce", lambda _, text: said.append(text))
    with served(cache, kv_offloading_memory_file=str(memory_file)) as first:
        expected = [output.token_ids for output in first.generate(PROMPTS, GREEDY)]
    with served(cache, kv_offloading_memory_file=str(memory_file)) as second:
        outputs = second.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert all(output.num_host_tokens > 0 for output in outputs)
    assert not any("outlive" in line for line in said)
    with served(cache, kv_offloading_memory_file=str(tmp_path)) as third:
        assert [output.token_ids for output in third.generate(PROMPTS, GREEDY)] == expected
    message = f"do not outlive this engine: runtime.kv_offloading_memory_file: {tmp_path}: Is a directory"
    assert any(line.endswith(message) for line in said)


@pytest.mark.slow
def test_two_engines_share_no_memory_and_the_second_says_so(
    cache: Path, kept: KeptMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Timeline, "announce", lambda _, text: said.append(text))
    monkeypatch.setattr("mllm_compile.runtime.tiers.kept._LOCK_S", 0.0)
    with served(cache) as first, served(cache) as second:
        assert any("do not outlive this engine" in line for line in said)
        first.generate(PROMPTS, GREEDY)
        assert not any(output.num_host_tokens for output in second.generate(PROMPTS, GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.4])
def test_an_engine_that_is_killed_leaves_prefixes_that_give_its_tokens(
    cache: Path, kept: KeptMemory, delay_s: float
) -> None:
    command, fds = [sys.executable, "-c", CHILD, str(cache)], [kept.descriptor]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=fds)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "answered\n"
        time.sleep(delay_s)
    finally:
        child.kill()
        child.wait()
    with served(cache) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        engine.flush_prefix_cache()
        expected = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        assert not any(output.num_host_tokens for output in engine.generate(PROMPTS, GREEDY))
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.slow
def test_a_servers_engine_that_is_killed_comes_back_with_its_prefixes(tmp_path: Path) -> None:
    """Usage and figures tell the tiers, too."""
    config = tiny_config(tmp_path / "cache", runtime=RUNTIME, compile={"backend": "eager"})
    path = tmp_path / "tiny.yaml"
    path.write_text(config.model_dump_json(exclude_defaults=True))
    command = [sys.executable, "-m", "mllm_compile", "serve", str(path), "--port", "0"]
    with running(command, tmp_path / "log") as server:

        def ask() -> tuple[list[int], dict[str, int]]:
            answer = server.complete(prompt=PROMPTS[0], max_tokens=5, temperature=0, return_token_ids=True).json
            details = answer["usage"]["prompt_tokens_details"]
            return answer["choices"][0]["token_ids"], details.get("cached_tokens_details", {})

        tokens, by_tier = ask()
        assert not by_tier
        until(lambda: _tier_figure(server, "pages") > 0, "a page is stored")
        os.kill(engine_of(server.process.pid), signal.SIGKILL)
        until(lambda: server.figure("mllm:engine_restarts_total") == 1 and server.is_ready(), "another engine")
        again, by_tier = ask()
        assert again == tokens
        assert by_tier["host"] > 0
        assert by_tier["storage"] == 0
        until(lambda: _tier_figure(server, "hit_tokens_total") == by_tier["host"], "the figure of hits")


@pytest.mark.slow
def test_the_next_server_has_the_prefixes_of_one_that_was_killed_in_a_named_file(
    tmp_path: Path, memory_file: Path
) -> None:
    runtime = RUNTIME | {"kv_offloading_memory_file": str(memory_file)}
    config = tiny_config(tmp_path / "cache", runtime=runtime, compile={"backend": "eager"})
    path = tmp_path / "tiny.yaml"
    path.write_text(config.model_dump_json(exclude_defaults=True))
    command = [sys.executable, "-m", "mllm_compile", "serve", str(path), "--port", "0"]
    asked = {"prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    with running(command, tmp_path / "first") as server:
        tokens = server.complete(**asked).json["choices"][0]["token_ids"]
        until(lambda: _tier_figure(server, "pages") > 0, "a page is stored")
        for pid in (server.process.pid, engine_of(server.process.pid)):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
    with running(command, tmp_path / "second") as server:
        answer = server.complete(**asked).json
    assert answer["choices"][0]["token_ids"] == tokens
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]["host"] > 0


@pytest.mark.slow
def test_a_server_that_sleeps_keeps_prefixes_in_no_more_memory_than_they_take(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "cache", runtime=RUNTIME, compile={"backend": "eager"})
    path = tmp_path / "tiny.yaml"
    path.write_text(config.model_dump_json(exclude_defaults=True))
    command = [sys.executable, "-m", "mllm_compile", "serve", str(path), "--port", "0", "--sleep-after", "1"]
    asked = {"prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    with running(command, tmp_path / "log") as server:
        tokens = server.complete(**asked).json["choices"][0]["token_ids"]
        until(lambda: server.get("/ready").json == {"state": "asleep"}, "the server sleeps, behind the answer")
        again = server.complete(**asked).json
        kept = re.findall(r"its prefixes keep [\d.]+ (\w+) of the host's memory meanwhile", server.said)
    assert kept and set(kept) == {"KiB"}, "of 51 MiB"
    assert again["choices"][0]["token_ids"] == tokens
    assert again["usage"]["prompt_tokens_details"]["cached_tokens_details"]["host"] > 0


def _tier_figure(server: object, name: str) -> float:
    text = server.get("/metrics").body.decode()  # type: ignore[attr-defined]
    found = re.search(rf'^mllm:kv_tier_{name}{{[^}}]*tier="host"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0
