"""The worker's own part, with an engine that takes no time."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.adapters.base import check_output
from mllm_compile.bench.measure import worker
from mllm_compile.bench.measure.images import features_a_side
from mllm_compile.bench.measure.results import run_from_json
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.measure.workloads import Call, ImagesWork, LatencyWork, LongWork, ThroughputWork
from mllm_compile.process import progress
from tests.tiny_model import tiny_config

SETTING = Setting(
    source="m.yaml",
    changes={},
    model_folder="m",
    dtype="float32",
    device="cpu",
    random_weights=True,
    max_model_len=64,
    vocab_size=100,
    trust_remote_code=False,
)


@dataclass
class StandInEngine:
    """Notes what it is asked."""

    version: str = "9"
    settings: dict[str, Any] = field(default_factory=lambda: {"dtype": "float32"})
    calls: list[Call] = field(default_factory=list)
    is_closed: bool = False
    kv_tokens: int | None = None

    def generate(self, call: Call) -> None:
        self.calls.append(call)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def engine(monkeypatch) -> StandInEngine:
    engine = StandInEngine()
    monkeypatch.setattr(worker, "open_engine", lambda name, setting: engine)
    return engine


def work(task: str, folder: Path, **job: Any) -> dict[str, Any]:
    (folder / "job.json").write_text(json.dumps({"task": task, "engine": "x", "setting": asdict(SETTING)} | job))
    worker.main(str(folder / "job.json"), str(folder / "result.json"))
    return json.loads((folder / "result.json").read_text())


def test_latency_warms_up_once_and_takes_turns(engine, tmp_path):
    sizes = LatencyWork(batches=(1, 2), input_len=5, output_len=3, repeats=2)
    done = work("latency", tmp_path, work=asdict(sizes))
    assert done.pop("place") is None, "another engine's is not kept beside our runtimes"
    run = run_from_json(done)
    assert [line.key for line in run.measurements] == [("tpot", 1), ("prefill", 1), ("tpot", 2), ("prefill", 2)]
    assert all(len(line.samples) == 2 for line in run.measurements)
    assert [(len(call.prompts), call.max_tokens[0]) for call in engine.calls] == 3 * [(1, 1), (1, 3)] + 3 * [
        (2, 1),
        (2, 3),
    ]
    assert (run.version, run.settings, engine.is_closed) == ("9", {"dtype": "float32"}, True)


def test_batches_whose_kv_does_not_fit_at_once_are_left_out_and_said(engine, tmp_path, capsys):
    engine.kv_tokens = 16
    sizes = LatencyWork(batches=(1, 2, 3), input_len=5, output_len=3, repeats=1)
    done = work("latency", tmp_path, work=asdict(sizes))
    del done["place"]
    run = run_from_json(done)
    assert sorted({line.batch for line in run.measurements}) == [1, 2]
    assert "left out, as requests would wait for the KV cache at batch 3" in capsys.readouterr().err


def test_work_that_does_not_fit_at_all_is_an_error(engine, tmp_path):
    engine.kv_tokens = 7
    sizes = LongWork(points=((1, 5), (2, 5)), output_len=3, repeats=1)
    assert "the KV cache holds none of the batches at once" in work("long", tmp_path, work=asdict(sizes))["error"]


def test_long_contexts_are_measured_point_by_point(engine, tmp_path, capsys):
    engine.kv_tokens = 40
    sizes = LongWork(points=((1, 10), (3, 5), (9, 5)), output_len=3, repeats=1)
    run = run_from_json(work("long", tmp_path, work=asdict(sizes)))
    assert [line.key for line in run.measurements] == [
        ("tpot at 10", 1),
        ("prefill of 10", 1),
        ("tpot at 5", 3),
        ("prefill of 5", 3),
    ]
    assert [(len(call.prompts), len(call.prompts[0]), call.max_tokens[0]) for call in engine.calls[:2]] == [
        (1, 10, 1),
        (1, 10, 3),
    ]
    assert "9 x 5: left out" in capsys.readouterr().err and engine.is_closed


class StandInImages(StandInEngine):
    """An image of `side` pixels has as many features."""

    def image(self, side: int, seed: int) -> tuple[int, int]:
        return side, seed

    def num_features(self, side: int) -> int:
        return side

    def prompt(self, before: list[int], image: tuple[int, int], after: list[int]) -> list[Any]:
        return [*before, image, *after]


def test_images_are_new_in_every_repeat_and_then_the_same_amid_other_text(monkeypatch, tmp_path):
    engine = StandInImages(kv_tokens=40)
    monkeypatch.setattr(worker, "open_images", lambda name, setting: engine)
    sizes = ImagesWork(batches=(1, 2, 9), side=7, text_len=5, output_len=3, repeats=2)
    done = work("images", tmp_path, work=asdict(sizes))
    assert done.pop("prompt_len") == 12
    names = ("first token, new images", "first token, same images", "first token, text")
    names += ("tpot, behind images", "tpot, text")
    run = run_from_json(done)
    assert [line.key for line in run.measurements] == [(name, batch) for batch in (1, 2) for name in names]
    assert all(len(line.samples) == 2 for line in run.measurements)
    calls = engine.calls[15:]  # of two requests
    assert [call.max_tokens for call in calls[:5]] == [[1, 1], [1, 1], [3, 3], [1, 1], [3, 3]]
    seen = [[[one for one in prompt if isinstance(one, tuple)] for prompt in call.prompts] for call in calls]
    assert seen[0] == seen[1] == seen[2] != seen[5] and seen[3] == seen[4] == [[], []]
    assert len({str(call.prompts) for call in calls}) == len(calls) == 15
    assert {len(prompt) for prompt in calls[3].prompts} == {12}


def test_a_folder_without_a_tower_has_no_images_to_measure(tmp_path):
    (tmp_path / "config.json").write_text('{"vision_config": {"patch_size": 14, "spatial_merge_size": 2}}')
    assert [features_a_side(str(tmp_path), side) for side in (1, 28, 1024)] == [1, 1, 37]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BenchmarkError, match="has no vision_config with patch_size"):
        features_a_side(str(tmp_path), 1024)


def test_switches_are_what_changed_something_in_the_compiled_runtime(eager_cache, tmp_path):
    config = tiny_config(eager_cache, compile={"backend": "eager"})
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    setting = replace(SETTING, source=str(tmp_path / "m.yaml"))
    at_work = work("switches", tmp_path, setting=asdict(setting))["switches"]
    assert "pack_projections" in at_work
    idle = {"stream_linears", "sample_in_graph", "copy_prefix", "divide_prefix"}
    assert not idle & set(at_work), "a CPU has no use for them"


def test_throughput_gives_a_rate_for_each_work(engine, tmp_path):
    sizes = ThroughputWork(mixed_requests=3, mixed_range=(2, 4), prefill_prompts=2, prefill_len=6, repeats=1)
    run = run_from_json(work("throughput", tmp_path, work=asdict(sizes)))
    assert [line.name for line in run.measurements] == ["prefill2x6", "mixed3"]
    assert len(engine.calls) == 4


def test_a_users_mistake_is_handed_to_whoever_started_the_process(engine, tmp_path, monkeypatch):
    def refuse(call: Call) -> None:
        raise BenchmarkError("a request failed: too long")

    monkeypatch.setattr(engine, "generate", refuse)
    result = work("latency", tmp_path, work=asdict(LatencyWork(batches=(1,))))
    assert result == {"error": "a request failed: too long"}


def test_an_engine_that_makes_other_numbers_of_tokens_has_no_time():
    call = Call(prompts=[[1], [2]], max_tokens=[3, 4])
    check_output(call, [3, 4])
    with pytest.raises(BenchmarkError, match="prompt 1 got 2 tokens where 4 were asked for"):
        check_output(call, [3, 2])


def test_the_kind_of_device_matches_the_config(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("model: {path: ./m}\nruntime: {device: cpu}")
    assert work("device", tmp_path, config=str(path)) == {"is_cpu": True}
    path.write_text("model: {path: ./m}\nruntime: {device: 'cuda:99'}")
    assert "cuda:99" in work("device", tmp_path, config=str(path))["error"]


def test_what_is_left_is_shown_between_the_calls(engine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_INTERVAL_S", 0.0)
    sizes = LatencyWork(batches=(1, 2), input_len=5, output_len=3, repeats=1)
    work("latency", tmp_path, work=asdict(sizes))
    lines = [line for line in capsys.readouterr().err.splitlines() if " % after " in line]
    shares = [line.partition(" after ")[0] for line in lines]
    assert shares == [f"x: batch {batch}, {batch} of 2: {share} %" for batch in (1, 2) for share in (25, 50, 75)]
