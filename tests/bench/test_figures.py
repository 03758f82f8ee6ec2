"""The measuring of the pages' figures: what a file keeps, what is left to measure, and how its processes end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.figures import __main__ as command
from benchmarks.figures import measure as measuring
from benchmarks.figures.measure import PARTS, Order, OutOfTime, findings, gpu_name, measure
from benchmarks.figures.shapes import SHAPES, Shape
from benchmarks.figures.sheet import Work
from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.limits.limits import ModelFigures
from mllm_compile.bench.measure.results import BenchResult
from mllm_compile.bench.measure.workloads import LatencyWork, ThroughputWork
from tests.bench.test_worker import SETTING
from tests.tiny_model import tiny_config

WORK = Work(
    LatencyWork(batches=(1, 2), input_len=8, output_len=3),
    ThroughputWork(mixed_requests=2, mixed_range=(2, 4), prefill_prompts=2, prefill_len=16),
    warm_starts=2,
)
NAME = "cpu-tiny-mllm.json"
FIGURES = ModelFigures(
    layer_params=1000,
    head_params=100,
    weight_itemsize=4,
    kv_bytes_per_token=64,
    attention_flops_per_pair=16,
    vocab_size=100,
    context_len=64,
)


def order(folder: Path, parts=PARTS, config: Path = Path("tiny.yaml"), deadline: float = float("inf")) -> Order:
    shapes = [Shape("tiny", "Tiny", config)]
    return Order(shapes=shapes, engines=["mllm"], parts=parts, work=WORK, folder=folder, deadline=deadline)


class StandIn:
    """A worker's results, without an engine; a part of `over` is when the time is over."""

    def __init__(self, commit: str = "feedbeef", experts: int = 1, over: str = "") -> None:
        self.commit, self.over, self.jobs, self.environments = commit, over, [], []
        self.figures = replace(FIGURES, num_experts=experts, num_chosen=1, expert_params=10 * (experts > 1))

    def __call__(self, job: dict[str, Any], deadline: float, environment: Any = None) -> Iterator[dict[str, Any]]:
        self.jobs.append(job)
        self.environments.append(environment)
        if job["task"] == "probe":
            yield {
                "environment": {"commit": self.commit, "device": "Some CPU", "date": "2020-01-01 00:00 UTC"},
                "ceilings": {"read_bytes_s": 1e9, "flops_s": 1e12},
            }
            for source in job["sources"]:
                yield {"source": source, "setting": asdict(SETTING), "figures": asdict(self.figures)}
        elif job["task"] == "experts":
            yield {"shares": [1 / self.figures.num_experts, 0.01]}
        else:
            yield {"ready": 2.0, "first token": 2.5, "version": "9", "settings": {}}
            for batch in job["batches"]:
                yield {"lines": list(map(asdict, WORK.latency.measurements(batch, [0.01] * 3, [0.05] * 3)))}
            for part in job["parts"]:
                if part == self.over:
                    raise OutOfTime
                call = getattr(WORK.throughput, {"prompts": "prefill_call", "mixed": "mixed_call"}[part])(100)
                made = {"prompts": WORK.throughput.prefill_measurement, "mixed": WORK.throughput.mixed_measurement}
                yield {"lines": [asdict(made[part](call, [0.5] * 3))]}


@pytest.fixture
def stand_in(monkeypatch):
    def put(**options: Any) -> StandIn:
        made = StandIn(**options)
        monkeypatch.setattr(measuring, "findings", made)
        return made

    return put


def read(folder: Path) -> dict[tuple[str, int | None], Any]:
    return {line.key: line for line in BenchResult.read(folder / NAME).runs[0].measurements}


def test_a_file_has_all_parts_with_their_limits(tmp_path, stand_in):
    stand_in()
    assert measure(order(tmp_path)) == []
    lines = read(tmp_path)
    assert [batch for name, batch in lines if name == "tpot"] == [1, 2]
    assert lines["tpot", 1].median == pytest.approx(20.0) and lines["tpot", 1].limit > 0
    assert lines["prefill2x16", None].limit > 0 and lines["mixed2", None].limit > 0
    assert lines["start cold", None].samples == (2.5,) and lines["start warm", None].samples == (2.5, 2.5)
    result = BenchResult.read(tmp_path / NAME)
    assert result.environment["commit"] == "feedbeef" and not result.environment["date"].startswith("2020")


def test_what_was_measured_when_the_time_was_over_is_kept_and_the_rest_follows(tmp_path, stand_in):
    stand_in(over="prompts")
    assert measure(order(tmp_path)) == ["mllm tiny: prompts", "mllm tiny: mixed", "mllm tiny: warm starts"]
    assert ("tpot", 2) in read(tmp_path)
    again = stand_in()
    assert measure(order(tmp_path)) == []
    first, *warm = (job for job in again.jobs if job["task"] == "engine")
    assert (first["batches"], first["parts"]) == ([], ["prompts", "mixed"])
    assert len(warm) == 2
    assert read(tmp_path)["start cold", None].samples == (2.5, 2.5), "each process began with empty caches"


def test_from_the_users_own_caches_no_start_is_a_cold_one(tmp_path, stand_in):
    made = stand_in()
    assert measure(replace(order(tmp_path), own_caches=True)) == []
    lines = read(tmp_path)
    assert ("tpot", 2) in lines and ("start cold", None) not in lines and len(lines["start warm", None].samples) == 2
    assert made.environments == [None] * len(made.jobs), "no cache is another than the user's"
    assert all(job["setting"] == asdict(SETTING) for job in made.jobs if job["task"] == "engine")


def test_figures_of_another_commit_are_not_mixed_with_new_ones(tmp_path, stand_in, capsys):
    stand_in(commit="0ld")
    measure(order(tmp_path))
    again = stand_in()
    assert measure(order(tmp_path, parts=["prompts"])) == []
    assert ("tpot", 1) not in read(tmp_path)
    assert f"{NAME} is of 0ld: it is measured anew" in capsys.readouterr().err
    assert measure(order(tmp_path, parts=["prompts"])) == []
    assert [job["task"] for job in again.jobs].count("engine") == 1, "nothing is measured twice"


def test_a_batch_whose_random_weights_choose_too_few_experts_is_no_result(tmp_path, stand_in):
    stand_in(experts=4)
    assert measure(order(tmp_path)) == []
    assert {batch for name, batch in read(tmp_path) if name == "tpot"} == {1}
    assert BenchResult.read(tmp_path / NAME).experts[0].touched == pytest.approx(1.0)


def test_figures_of_an_unknown_commit_are_refused(tmp_path, stand_in):
    stand_in(commit="unknown")
    with pytest.raises(BenchmarkError, match="name it by --commit"):
        measure(order(tmp_path))


def test_a_process_is_ended_when_the_time_is_over(monkeypatch):
    job = {"task": "probe", "sources": [], "largest_batch": 1, "longest_request": 2}
    with pytest.raises(OutOfTime):
        list(findings(job, 0.0))
    left = iter([1.0, 0.0])
    monkeypatch.setattr(measuring, "_left", lambda deadline: next(left))
    with pytest.raises(OutOfTime):
        list(findings(job, 0.0))
    assert next(left, None) is None, "a process was started"


def test_a_mistake_in_a_process_is_told_here(tmp_path):
    job = {"task": "probe", "sources": [str(tmp_path / "no.yaml")], "largest_batch": 1, "longest_request": 2}
    with pytest.raises(BenchmarkError, match=r"no\.yaml: there is no such file"):
        list(findings(job, float("inf")))


@pytest.mark.slow
def test_an_engine_is_measured_from_its_cold_start_to_its_warm_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("MLLM_COMPILE_COMMIT", "feedbeef")
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny_config(tmp_path, compile={"backend": "eager"}).model_dump(mode="json")))
    assert measure(order(tmp_path, config=config)) == []
    lines = read(tmp_path)
    assert ("tpot", 1) in lines and ("mixed2", None) in lines
    assert len(lines["start warm", None].samples) == 2


def test_the_name_of_a_file_says_which_gpu_it_is_of():
    assert gpu_name("NVIDIA H200") == "h200"
    assert gpu_name("NVIDIA H100 80GB HBM3") == "h100"
    assert gpu_name("AMD EPYC, 2 threads") == "cpu"


def test_the_configs_of_all_shapes_are_there():
    for shape in SHAPES:
        assert yaml.safe_load(shape.config.read_text())["model"]["load_format"] == "dummy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "9b"], "9b is not known; known: 0.6b, 8b,"),
        (["--engines", "sglang"], "sglang is not known; known: mllm, vllm"),
        (["--parts", "cold"], "cold is not known; known: tpot, prompts"),
        (["--batch", "x"], "--batch"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_the_command_line_says_what_is_measured(tmp_path, monkeypatch):
    monkeypatch.delenv("MLLM_COMPILE_COMMIT", raising=False)
    monkeypatch.setenv("MLLM_COMPILE_COMMIT", "old")
    given = ["--only", "8b,0.6b", "--batch", "1,64", "--parts", "tpot,warm", "--commit", "feedbeef"]
    asked = command.parse([*given, "--into", str(tmp_path), "--repeats", "1", "--own-caches"])
    assert asked.own_caches and [shape.name for shape in asked.shapes] == ["0.6b", "8b"]
    assert (asked.work.latency.batches, asked.work.latency.repeats, asked.work.warm_starts) == ((1, 64), 1, 1)
    assert json.dumps(asked.parts) == '["tpot", "warm"]'
