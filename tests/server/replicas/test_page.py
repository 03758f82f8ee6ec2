"""docs/server.md says what goes with several engines of a model, and what is refused."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mllm_compile.cli import run
from mllm_compile.config.sources import config_or_runtime
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.config_sections import KVEventsSection
from mllm_compile.server.engine_link import EngineLink
from mllm_compile.server.engine_process import EngineProcess
from mllm_compile.server.kept_memory import KeptMemory
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.replicas import devices

ROOT = Path(__file__).parents[3]
SECTION = (ROOT / "docs" / "server.md").read_text(encoding="utf-8").partition("| with `--replicas`")[2].split("\n\n")[0]
REFUSED = {
    name for line in SECTION.splitlines() if line.endswith("| refused |") for name in re.findall(r"`([^`]*)`", line)
}
TINY = str(ROOT / "mllm_compile" / "model" / "tiny")
OPTIONS: dict[str, dict[str, Any]] = {
    "--sleep-after": {"sleep_after_s": 9.0},
    "--kv-events-config": {"kv_events": KVEventsSection()},
    "--enable-rl": {"enable_rl": True},
    "--allow-runtime-lora": {"allow_runtime_lora": True},
}
KEYS = {
    "kv_offloading_memory_file": "{kv_offloading_size: 1, kv_offloading_memory_file: /dev/shm/x}",
    "kv_offloading_disk_path": "{kv_offloading_size: 1, kv_offloading_disk_path: /x, kv_offloading_disk_size: 1}",
    "distributed_executor_backend: ray": "{distributed_executor_backend: ray}",
    "nnodes: 2": "{nnodes: 2, master_addr: 10.0.0.1, tensor_parallel_size: 2}",
    "device: cuda:1": "{device: 'cuda:1'}",
}


def test_the_page_names_all_that_is_refused():
    assert {*OPTIONS, *KEYS, "--max-awake"} == REFUSED


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_one_engine_is_refused(option):
    with pytest.raises(ConfigError, match=f"^{option}: expected one engine, got --replicas 2. "):
        ServeOptions(model="", **OPTIONS[option]).check_replicas(2)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_one_engine_is_refused(key, tmp_path):
    (tmp_path / "model.yaml").write_text(f"model: {{path: {TINY}}}\nruntime: {KEYS[key]}\n")
    with pytest.raises(ConfigError, match=f"^--replicas 2: .*{key.partition(':')[0]}"):
        devices.devices_of(2, config_or_runtime(str(tmp_path / "model.yaml")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TINY, f"b={TINY}", "--replicas", "2"], "--replicas 2: expected one model, got 2"),
        ([TINY, "--replicas", "2", "--max-awake", "1"], "--max-awake, --turn: expected several models"),
        ([TINY, "--replicas", "65"], "--replicas: expected from 2 to 64, got 65"),
        ([TINY, "--replicas", "0"], "--replicas"),
        ([TINY, "--replicas", "2", "--enable-rl"], "--enable-rl: expected one engine, got --replicas 2"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(arguments, message, capsys):
    assert run(["serve", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_each_engine_has_gpus_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "visible_gpus", lambda: ["2", "3", "5", "7"])
    config = tmp_path / "model.yaml"
    config.write_text(f"model: {{path: {TINY}}}\nruntime: {{tensor_parallel_size: 2}}\n")
    assert devices.devices_of(4, config_or_runtime(TINY)) == ("2", "3", "5", "7")
    assert devices.devices_of(2, config_or_runtime(str(config))) == ("2,3", "5,7")
    with pytest.raises(ConfigError, match="expected 6 GPUs, 2 for each engine, and 4 are visible"):
        devices.devices_of(3, config_or_runtime(str(config)))
    config.write_text(f"model: {{path: {TINY}}}\nruntime: {{device: cpu}}\n")
    assert devices.devices_of(8, config_or_runtime(str(config))) == (None,) * 8


def test_an_engines_process_sees_its_gpus_alone(tmp_path):
    told = tmp_path / "told"
    script = f"import os; open({str(told)!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"

    async def work() -> None:
        options, kept = ServeOptions(model="", devices="5,7"), KeptMemory()
        started = EngineProcess(lambda descriptor: [sys.executable, "-c", script], kept, options.environment)
        link = EngineLink(started, lambda frame: None, lambda event: None)
        await link.exited.wait()
        link.kill()
        kept.close()

    asyncio.run(work())
    assert told.read_text() == "5,7"
