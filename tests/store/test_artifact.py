"""The cached runtime on disk: whole or absent, refused when changed, and no harm in two compiles at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mllm_compile import EngineConfig
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.errors import ArtifactError
from mllm_compile.process.progress import LogReporter, NullReporter, Stage
from mllm_compile.store.artifact import hash_files, open_artifact, read_manifest, write_manifest
from tests.tiny_model import shallow_tiny, tiny_config

EAGER = {"backend": "eager"}


class Recorder(NullReporter):
    """Keeps the names of stages and what is noted; can interrupt a stage, as Ctrl-C does."""

    def __init__(self, interrupted: str | None = None) -> None:
        self.interrupted = interrupted
        self.stages: list[str] = []
        self.notes: list[str] = []

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        self.stages.append(name)
        with super().stage(name, total) as stage:
            yield stage
        if name == self.interrupted:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shallow_tiny(tmp_path_factory.mktemp("shallow") / "model")


@pytest.fixture(scope="module")
def filled_cache(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the model's runtime."""
    cache = tmp_path_factory.mktemp("filled")
    load_or_compile(config_of(model, cache))
    return cache


def config_of(model: Path, cache: Path, **sections: Any) -> EngineConfig:
    return tiny_config(cache, **{"model": {"path": str(model)}, "compile": EAGER} | sections)


@pytest.fixture
def config(model: Path, filled_cache: Path, tmp_path: Path) -> EngineConfig:
    """Of a cache of its own, which holds the compiled runtime."""
    shutil.copytree(filled_cache, tmp_path / "cache")
    return config_of(model, tmp_path / "cache")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_runtime_is_found_again(config):
    recorder = Recorder()
    runtime = load_or_compile(config, recorder)
    assert runtime.was_cached
    assert recorder.notes == []


def test_a_compile_is_announced_with_the_reason(model, tmp_path, caplog):
    config = config_of(model, tmp_path / "cache")
    load_or_compile(config, LogReporter())
    load_or_compile(config, LogReporter(), CompileOptions(output=tmp_path / "out"))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"compiling {model}: nothing was compiled for this model yet. This is done once.",
        "computing on the CPU in float32: as model.dtype says",
        f"compiling {model}: there is no runtime in this folder yet. This is done once.",
        "computing on the CPU in float32: as model.dtype says",
    ]
    caplog.clear()
    assert load_or_compile(config, LogReporter()).was_cached
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_keys_that_a_cpu_does_nothing_with_are_told(model, filled_cache, caplog):
    graphs = {"decode_requests": [1, 2]}
    load_or_compile(config_of(model, filled_cache, cudagraph=graphs), LogReporter())
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "without effect on a CPU: cudagraph.decode_requests"
    ]


def test_sizes_of_batches_need_no_other_runtime_and_what_shapes_pieces_does(config, model, tmp_path):
    cache = tmp_path / "cache"
    assert load_or_compile(config_of(model, cache, runtime={"max_running_requests": 2, "page_size": 8})).was_cached
    other = load_or_compile(config_of(model, cache, compile=EAGER | {"disable_passes": ["pack_projections"]}))
    assert not other.was_cached
    assert load_or_compile(config).was_cached, "both are kept"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_models_of_one_shape_with_other_text_files_have_runtimes_of_their_own(config, model, tmp_path, name):
    tuned = tmp_path / "tuned"
    shutil.copytree(model, tuned)
    same = config_of(tuned, tmp_path / "cache")
    assert load_or_compile(same).was_cached, "where the model lies does not matter"
    text = (tuned / name).read_text()
    (tuned / name).write_text(text + "\n" if name.endswith("jinja") else json.dumps(json.loads(text) | {"changed": 1}))
    assert not load_or_compile(same).was_cached
    assert load_or_compile(config).was_cached


def test_the_folder_holds_what_people_read(config):
    names = {path.name for path in files(load_or_compile(config).folder)}
    assert {"manifest.json", "program.json", "config.json", "tokenizer.json"} <= names
    assert "00_trace.txt" in names
    assert any(name.endswith("_deduplicate_pieces.txt") for name in names)
    assert not [name for name in names if name.endswith((".pkl", ".pickle", ".bin"))]


@pytest.mark.parametrize("kind", ["program.json", "manifest.json"])  # more in test_artifact_damage.py
def test_a_changed_file_is_refused_which_is_told_once_and_the_model_compiled_again(config, kind):
    folder = load_or_compile(config).folder
    path = next(path for path in files(folder) if path.match(kind))
    path.write_bytes(path.read_bytes().replace(b"0", b"1") + b" ")
    recorder = Recorder()
    again = load_or_compile(config, recorder)
    assert not again.was_cached
    told = [note for note in recorder.notes if note.startswith("the cached runtime is not used")]
    assert len(told) == 1 and recorder.notes[0] == told[0], recorder.notes
    assert load_or_compile(config).was_cached


SMALL = {"role": "values", "scheme": {"kind": "fp8", "group": 128, "scale_dtype": "float32", "has_zeros": False}}


def quantise_a_part(content: dict[str, Any]) -> None:
    parts = content["weights"][0][0]["parts"]
    (parts.get("fields") or parts["all"])["kept"] = {"all": SMALL} if "fields" in parts else SMALL


def quantise_what_is_plain(content: dict[str, Any]) -> None:
    name = content["weights"][0][0]["name"]
    weight = {"scales": f"{name}_scales", "zeros": None, "outputs": 8, "inputs": 8}
    content["program"]["quantised_weights"] = {name: weight}


@pytest.mark.parametrize(
    ("forge", "message"),
    [(quantise_a_part, "has values in torch.float8_e4m3fn, not torch.float32"), (quantise_what_is_plain, "_scales")],
)
def test_a_program_that_contradicts_itself_is_refused_though_its_hash_is_right(config, forge, message):
    folder = load_or_compile(config).folder
    manifest, path = read_manifest(folder), folder / "program.json"
    content = json.loads(path.read_text())
    forge(content)
    path.write_text(json.dumps(content))
    write_manifest(folder, replace(manifest, files=hash_files(folder)))
    with pytest.raises(ArtifactError, match=f"is not a runtime that this version writes .*{message}"):
        open_artifact(folder)


@pytest.mark.parametrize("change", ["a file too many", "a file too few"])
def test_a_folder_of_other_files_is_refused(config, change):
    folder = load_or_compile(config).folder
    piece = next(path for path in files(folder) if path.suffix == ".py")
    if change == "a file too many":
        shutil.copy(piece, piece.with_name("extra.py"))
    else:
        piece.unlink()
    assert not load_or_compile(config, Recorder()).was_cached


@pytest.mark.parametrize("stage", ["trace", "plan weights", "self-check"])
def test_a_compile_that_is_interrupted_leaves_nothing(model, tmp_path, stage):
    config = config_of(model, tmp_path / "cache")
    recorder = Recorder(interrupted=stage)
    with pytest.raises(KeyboardInterrupt):
        load_or_compile(config, recorder)
    assert recorder.stages[-1] == stage
    left = [path.name for path in files(tmp_path / "cache")]
    assert left in ([], [".compilers.lock"]), "a lock's file is never removed"


def test_a_compile_that_is_killed_leaves_nothing_that_is_taken_for_whole(config):
    # Leftovers of a kill: the scratch folder beside the final place, its last files missing or cut short.
    whole = load_or_compile(config).folder
    scratch = whole.rename(whole.with_name(f".{whole.name}.killed.part"))
    (scratch / "manifest.json").unlink()
    (scratch / "program.json").write_text("{")
    assert not load_or_compile(config).was_cached
    assert not scratch.exists(), "the next compile removes it"
    assert load_or_compile(config).was_cached


def test_two_compiles_at_once_leave_one_whole_runtime(model, tmp_path):
    path = tmp_path / "model.yaml"
    config = config_of(model, tmp_path / "cache")
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "mllm_compile", str(path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, err = process.communicate()
        assert process.returncode == 0, err
    assert len(list((tmp_path / "cache" / "runtimes").iterdir())) == 1
    assert load_or_compile(config).was_cached
