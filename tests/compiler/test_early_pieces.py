"""Pieces that are compiled beside the trace: the same files come of it, whatever a shallow copy turns out to be."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.compiler import early_pieces
from mllm_compile.compiler.early_pieces import EarlyPiece, compile_pieces, start_early_pieces
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.compiler.lowering import build_model, lower
from mllm_compile.compiler.pieces import write_pieces
from mllm_compile.compiler.target import find_target
from mllm_compile.errors import CompileError
from mllm_compile.inductor.job import PieceJob
from mllm_compile.inductor.workers import PieceWorkers
from mllm_compile.kernels.cuda import KernelCompiler
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of
from tests.sample import slow_but_a_sample
from tests.store.test_artifact import Recorder

DEPTH = 5  # as few as are more than twice the two that are traced early


class FakeWorkers(PieceWorkers):
    """Writes what would be compiled; pieces of the early folder fail if asked to."""

    def __init__(self, early_fails: bool = False) -> None:
        self.compiled: list[Path] = []
        self._early_fails = early_fails
        self._pool = ThreadPoolExecutor(2)

    def submit(self, job: PieceJob) -> Future[None]:
        return self._pool.submit(self._compile, job)

    def _compile(self, job: PieceJob) -> None:
        if self._early_fails and job.package_path.parent.name == "early":
            raise CompileError(f"piece {job.piece} does not compile: no reason")
        job.package_path.write_text(f"{job.inputs}\n{job.source_path.read_text()}")
        self.compiled.append(job.package_path)


@pytest.fixture(autouse=True)
def enough_cores_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_pieces, "_MIN_CORES", 1)
    monkeypatch.setattr(early_pieces, "_MIN_LAYERS", DEPTH)


def config_of(folder: Path, model_type: str = "qwen3", depth: int = DEPTH) -> EngineConfig:
    """Of a new random model."""
    kinds = shape_of(model_type).to_dict().get("layer_types")
    changes = {"layer_types": (kinds * depth)[:depth]} if kinds else {}
    save_tiny_model(shape_of(model_type, num_hidden_layers=depth, **changes), folder / "model")
    return EngineConfig.from_dict(
        {
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "runtime": {"device": "cpu", "max_model_len": 64},
            "cache": {"dir": str(folder / "cache")},
        }
    )


def build_pieces(folder: Path, config: EngineConfig, workers: FakeWorkers) -> tuple[dict[str, EarlyPiece], list[str]]:
    """Early pieces, then all that the model has, in `folder`/pieces; returns the early ones and the stages."""
    (folder / "early").mkdir(parents=True)
    (folder / "pieces").mkdir()
    target, recorder = find_target(config), Recorder()
    hf_model = build_model(target.config, target.model, recorder)
    with KernelCompiler() as linears:
        early = start_early_pieces(target.config, hf_model, workers, linears, folder / "early", recorder)
    jobs = write_pieces(lower(target.config, hf_model, folder, recorder), folder / "pieces")
    compile_pieces(jobs, early, workers, lambda: None)
    return early, recorder.stages


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "pieces").iterdir()}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return config_of(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def expected(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that come of a compile with no early pieces."""
    folder = tmp_path_factory.mktemp("expected") / "build"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early_pieces, "_MIN_LAYERS", DEPTH + 1)
        early, stages = build_pieces(folder, config, FakeWorkers())
    assert early == {}
    assert "trace 2 layers" not in stages
    return contents(folder)


def test_pieces_of_two_layers_are_all_that_a_deep_model_has(tmp_path, config, expected):
    workers = FakeWorkers()
    early, stages = build_pieces(tmp_path, config, workers)
    assert contents(tmp_path) == expected
    assert len(workers.compiled) == len(early) == len(expected) // 2
    assert {path.parent.name for path in workers.compiled} == {"early"}
    assert stages.index("trace 2 layers") < stages.index("trace")


def change_width(hf_config: Any) -> Any:
    hf_config.intermediate_size *= 2
    return hf_config


def test_pieces_of_another_model_are_dropped(tmp_path, config, expected, monkeypatch):
    plain = early_pieces.deepcopy
    monkeypatch.setattr(early_pieces, "deepcopy", lambda hf_config: change_width(plain(hf_config)))
    early, _ = build_pieces(tmp_path, config, FakeWorkers())
    assert len(early) == 4
    assert contents(tmp_path) == expected


def test_pieces_of_the_same_name_and_another_source_are_dropped(tmp_path, config, expected, monkeypatch):
    workers = FakeWorkers()
    plain = early_pieces.EarlyPiece.is_for

    def is_for(self: EarlyPiece, job: PieceJob) -> bool:
        self.job.source_path.write_text("another")
        return plain(self, job)

    monkeypatch.setattr(early_pieces.EarlyPiece, "is_for", is_for)
    build_pieces(tmp_path, config, workers)
    assert contents(tmp_path) == expected
    assert sum(path.parent.name == "pieces" for path in workers.compiled) == 4


def test_pieces_that_fail_early_are_compiled_again(tmp_path, config, expected):
    workers = FakeWorkers(early_fails=True)
    build_pieces(tmp_path, config, workers)
    assert contents(tmp_path) == expected
    assert len(workers.compiled) == 4


@pytest.mark.parametrize("function", ["_shallow_copy", "max_traced_tokens"])
def test_an_exception_on_the_way_is_harmless(tmp_path, config, expected, monkeypatch, function):
    def fail(*args: Any) -> Any:
        raise KeyError(function)

    monkeypatch.setattr(early_pieces, function, fail)
    early, _ = build_pieces(tmp_path, config, FakeWorkers())
    assert early == {}
    assert contents(tmp_path) == expected


def test_the_models_own_piece_raises_the_error(tmp_path):
    class Failing(FakeWorkers):
        def _compile(self, job: PieceJob) -> None:
            raise CompileError(f"piece {job.piece} does not compile (its source: {job.source_path})")

    def job(folder: str) -> PieceJob:
        (tmp_path / folder).mkdir()
        source = tmp_path / folder / "piece_x.py"
        source.write_text("x")
        return PieceJob("piece_x", source, (), source.with_suffix(".pt2"))

    workers = Failing()
    early_job = job("early")
    early = {"piece_x": EarlyPiece(early_job, workers.submit(early_job))}
    with pytest.raises(CompileError, match=r"piece piece_x does not compile .*/pieces/piece_x\.py"):
        compile_pieces([job("pieces")], early, workers, lambda: None)


def test_a_shallow_model_is_left_alone(tmp_path):
    early, stages = build_pieces(tmp_path / "build", config_of(tmp_path, depth=4), FakeWorkers())
    assert early == {}
    assert "trace 2 layers" not in stages


@pytest.mark.parametrize(
    ("model_type", "num_missed"),
    slow_but_a_sample([("gemma3_text", 1), ("qwen3_moe", 0), ("gpt2", 0), ("llama", 0)], 2),
)
def test_other_architectures_have_early_pieces_too(tmp_path, model_type, num_missed):
    """Missed is what is between the second kind of layer and the first, where kinds alternate."""
    workers = FakeWorkers()
    early, _ = build_pieces(tmp_path / "build", config_of(tmp_path, model_type), workers)
    assert len(early) == 4
    assert sum(path.parent.name == "pieces" for path in workers.compiled) == num_missed


@pytest.mark.slow  # what Inductor needs for four pieces
def test_a_runtime_of_early_pieces_alone_is_right(tmp_path, config, monkeypatch):
    submitted = []
    submit = PieceWorkers.submit
    monkeypatch.setattr(PieceWorkers, "submit", lambda self, job: submitted.append(job) or submit(self, job))
    runtime = load_or_compile(config)  # its self-check compares the logits with Transformers'
    assert len(submitted) == runtime.num_distinct_pieces == 4
    assert not any(job.package_path.parent == runtime.folder / "pieces" for job in submitted)
    assert all(not job.package_path.parent.exists() for job in submitted)
    assert sorted(path.suffix for path in (runtime.folder / "pieces").iterdir()) == [".pt2"] * 4 + [".py"] * 4
    with Engine(config) as engine:
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3))
    assert len(output.token_ids) == 3
