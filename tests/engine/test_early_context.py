"""The context that is made beside imports: the GPU, the process, and whose errors they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mllm_compile.config.schema import EngineConfig
from mllm_compile.engine.start import early_context as module
from mllm_compile.engine.start.early_context import early_context
from mllm_compile.process.timeline import Timeline
from tests.config.resolving import H200, resolved

LOADING = "CUDA_MODULE_LOADING"


class Driver:
    """Notes the devices whose contexts are retained and released; `number_of` fails for devices that are not there."""

    def __init__(self, count: int = 8, starts: bool = True) -> None:
        self.retained: list[int] = []
        self.released: list[int] = []
        self.loading: str | None = None
        self._count, self._starts = count, starts

    def cuInit(self, flags: int) -> int:
        self.loading = os.environ.get(LOADING)
        return 0 if self._starts else 3

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 100 + number
        return 0 if number < self._count else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.retained.append(device.value)
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.released.append(device.value)
        return 0


@pytest.fixture
def driver(monkeypatch) -> Driver:
    monkeypatch.delenv(LOADING, raising=False)
    monkeypatch.setattr(module, "_has_cuda", lambda: True)
    return play(monkeypatch, Driver())


def play(monkeypatch, driver: Driver) -> Driver:
    monkeypatch.setattr(module, "_driver", lambda: driver)
    return driver


def config(**runtime: object) -> EngineConfig:
    return EngineConfig.from_dict({"model": {"path": "a/b"}, "runtime": runtime})


def start(source: EngineConfig | Path) -> list[str]:
    """The stages of a start that has nothing else to do."""
    timeline = Timeline()
    with early_context(source, timeline):
        pass
    return [span.name for span in timeline.spans]


@pytest.mark.parametrize(("device", "number"), [("auto", 0), ("cuda", 0), ("cuda:3", 3)])
def test_the_context_is_that_of_the_config_s_gpu(driver, monkeypatch, device, number):
    assert start(config(device=device)) == ["device context"]
    assert (driver.retained, driver.released) == ([100 + number], [])
    assert driver.loading == "LAZY", "kernels are loaded when they are first launched, as torch has it"
    monkeypatch.setenv(LOADING, "EAGER")
    start(config(device=device))
    assert driver.loading == "EAGER", "a user's own choice"


def test_rank_0_of_several_has_its_own(driver):
    start(config(device="cuda:2", tensor_parallel_size=2))
    assert driver.retained == [102]


@pytest.mark.parametrize(
    "runtime",
    [
        {"device": "cpu"},
        {"device": "cuda:4294967296"},  # 0 as an int of C
        {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
        {"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 1, "pipeline_parallel_size": 2},
    ],
)
def test_no_thread_begins_where_this_process_will_have_no_gpu_of_its_own(driver, runtime):
    assert start(config(**runtime)) == []
    assert driver.loading is None
    assert LOADING not in os.environ


def test_a_runtime_s_folder_says_its_gpu(driver, tmp_path):
    told = resolved(H200, runtime={"device": "cuda:0"}).model_dump(mode="json")
    (tmp_path / "manifest.json").write_text(json.dumps({"config": told}))
    assert start(tmp_path) == ["device context"]
    assert driver.retained == [100]


def test_a_runtime_s_folder_with_another_device_is_left_to_who_opens_it(driver, tmp_path):
    told = resolved(H200, runtime={"device": "cuda:0"}).model_dump(mode="json")
    told["runtime"]["device"] = "cuda:x"
    (tmp_path / "manifest.json").write_text(json.dumps({"config": told}))
    assert start(tmp_path) == []


def test_a_folder_that_is_no_runtime_is_left_to_who_opens_it(driver, tmp_path):
    assert start(tmp_path) == []


def test_torch_without_cuda_gets_no_context(driver, monkeypatch):
    monkeypatch.undo()
    play(monkeypatch, driver)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert start(config(device="cuda")) == []


@pytest.mark.parametrize(
    "faulty", [None, Driver(starts=False), Driver(count=0)], ids=["no driver", "does not start", "no such device"]
)
def test_what_fails_is_left_to_torch(driver, monkeypatch, faulty):
    play(monkeypatch, faulty)
    assert start(config(device="cuda:1")) == ([] if faulty is None else ["device context"])  # so it ended in no error
    assert faulty is None or faulty.retained == []


def test_a_start_that_fails_ends_behind_the_driver_s_start_and_gives_the_context_back(driver, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    class Thread(threading.Thread):
        def join(self, *limit: float) -> None:
            may_end.set()
            super().join(*limit)

    def init(flags: int) -> int:
        begun.set()
        may_end.wait()
        return 0

    monkeypatch.setattr(module.threading, "Thread", Thread)
    monkeypatch.setattr(driver, "cuInit", init, raising=False)
    with pytest.raises(ValueError, match="no such model"), early_context(config(device="cuda"), Timeline()):
        begun.wait()
        raise ValueError("no such model")
    assert driver.retained == driver.released == [100]


def test_the_module_imports_no_torch():
    code = "import mllm_compile.engine.start.early_context, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
