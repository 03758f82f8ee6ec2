from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.measure import harness
from mllm_compile.bench.measure.harness import WORKER, cache_environment, run_gaps, run_process, run_startup
from mllm_compile.bench.measure.workloads import GapsWork, StartupWork
from tests.bench.test_worker import SETTING


def test_a_mistake_in_a_process_becomes_an_error_here(tmp_path):
    job = {"task": "probe", "config": str(tmp_path / "no.yaml"), "largest_batch": 1, "longest_request": 2}
    with pytest.raises(BenchmarkError, match=r"no\.yaml: there is no such file"):
        run_process(WORKER, job | {"ceilings": False})


def test_a_process_that_dies_is_told_of():
    with pytest.raises(BenchmarkError, match="the process for nosuch ended with code 1"):
        run_process(WORKER, {"task": "nosuch"})


def test_engines_are_checked_before_anything_runs(tmp_path):
    with pytest.raises(BenchmarkError, match="--engine 'sglang' is not known; known: mllm, vllm, transformers"):
        run_startup(tmp_path / "no.yaml", ["mllm", "sglang"], StartupWork())


def test_an_engine_that_is_not_there_is_named_with_the_way_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("mllm_compile.bench.adapters.find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match="--engine vllm is not installed here: pip install vllm"):
        run_startup(tmp_path / "no.yaml", ["vllm"], StartupWork())


def test_an_engine_without_streams_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(BenchmarkError, match="--engine transformers takes no request while others run: leave it out"):
        run_gaps(tmp_path / "no.yaml", ["mllm", "transformers"], GapsWork())


def test_every_cold_start_has_caches_of_its_own_and_its_warm_start_the_same(tmp_path, monkeypatch):
    started: list[tuple[str, str]] = []

    def stand_in(module: str, job: dict[str, Any], environment: dict[str, str] | None = None) -> dict[str, Any]:
        if module == WORKER:
            return {"setting": asdict(SETTING), "environment": {}}
        assert environment is not None
        started.append((job["setting"]["changes"]["cache"]["dir"], environment["TRITON_CACHE_DIR"]))
        seconds = 1.0 + 10 * (len(started) % 2)  # cold ones are first, third, …
        times = {"ready": seconds - 0.5, "first token": seconds, "parts": {"import": 0.5}}
        return times | {"version": "1", "settings": {}}

    monkeypatch.setattr(harness, "run_process", stand_in)
    result = run_startup(tmp_path / "m.yaml", ["mllm"], StartupWork(repeats=2))
    assert started[0] == started[1] != started[2] == started[3]
    lines = {line.name: line.samples for line in result.runs[0].measurements}
    assert lines["start cold"] == (11.0, 11.0)
    assert lines["start warm"] == (1.0, 1.0)
    assert lines["ready warm"] == (0.5, 0.5)
    assert lines["cold: import"] == lines["warm: import"] == (0.5, 0.5)


def test_caches_that_a_start_could_profit_from_are_moved(tmp_path):
    names = set(cache_environment(tmp_path))
    of_others = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH"}
    assert names == {*of_others, "MLLM_COMPILE_CACHE"}
