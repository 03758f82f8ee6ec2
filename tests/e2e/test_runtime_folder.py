"""A runtime as a folder of its own: given to an engine as it is, its weights inside or where they were."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from mllm_compile import Engine, SamplingParams
from mllm_compile.cli.cache import verify_command
from mllm_compile.compiler.load_or_compile import load_or_compile, open_runtime
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.errors import ArtifactError, CheckpointError, ConfigError, DamagedWeightsError
from mllm_compile.files.cache_folders import compiler_cache
from mllm_compile.store.artifact import open_artifact, read_manifest, write_manifest
from mllm_compile.store.opened import CompiledRuntime
from tests.tiny_model import TINY, shallow_tiny, tiny_config

EAGER = {"backend": "eager"}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = "The for statement is used to"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runtime with its weights inside, their data hashed; the checkpoint that it was compiled from is gone."""
    folder = tmp_path_factory.mktemp("packed")
    shutil.copytree(TINY, folder / "model")
    config = tiny_config(folder / "cache", compile=EAGER, model={"path": str(folder / "model")})
    options = CompileOptions(output=folder / "runtime", pack_weights=True, verify_weights=True)
    assert not load_or_compile(config, None, options).was_cached
    assert load_or_compile(config, None, options).was_cached
    kept = compiler_cache(folder / "cache")  # C++ for the CPU, once a machine
    assert {path for path in kept.parent.iterdir() if not path.name.endswith(".lock")} <= {kept}
    shutil.rmtree(folder / "cache")
    shutil.rmtree(folder / "model")
    return folder / "runtime"


@pytest.fixture
def folder(eager_cache: Path, tmp_path: Path) -> Path:
    """A runtime whose weights are in a checkpoint of its own."""
    shutil.copytree(eager_cache, tmp_path / "cache")
    shutil.copytree(TINY, tmp_path / "model")
    found = load_or_compile(tiny_config(tmp_path / "cache", compile=EAGER, model={"path": str(tmp_path / "model")}))
    assert found.was_cached
    manifest = found.artifact.manifest
    weights = replace(manifest.weights, folder=str(tmp_path / "model"))
    write_manifest(found.folder, replace(manifest, weights=weights))
    return found.folder


def tokens(source) -> list[int]:
    with Engine(source) as engine:
        return engine.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def test_a_folder_gives_the_tokens_of_its_config(folder, packed, eager_cache):
    expected = tokens(tiny_config(eager_cache, compile=EAGER))
    assert tokens(folder) == tokens(str(folder)) == expected
    assert tokens(packed) == expected, "also where the weights are in it, and the checkpoint is gone"


def test_a_folder_can_be_moved(folder, packed, tmp_path):
    folder.rename(tmp_path / "moved")
    shutil.copytree(packed, tmp_path / "copied")
    assert tokens(tmp_path / "moved") == tokens(tmp_path / "copied")


def test_a_folder_serves_with_the_config_that_it_was_compiled_from(folder):
    assert open_runtime(folder).config.runtime.max_model_len == 512


def test_weights_that_are_gone_or_others_are_refused(folder, tmp_path):
    weights = tmp_path / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole.replace(b"model.norm.weight", b"model.norm.WEIGHT", 1))
    with pytest.raises(CheckpointError, match="is not the file that was compiled for"):
        open_runtime(folder)
    weights.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        open_runtime(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        open_runtime(folder)


def test_a_folder_of_another_machine_or_version_is_refused_by_name(folder):
    manifest = read_manifest(folder)
    for factor in ("torch", "CPU", "mllm_compile"):
        write_manifest(folder, replace(manifest, factors={**manifest.factors, factor: "another"}))
        with pytest.raises(ArtifactError, match=f"was compiled for {factor} 'another', here it is "):
            open_runtime(folder)


def test_a_folder_of_another_format_says_so(folder):
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": {}}))
    with pytest.raises(ArtifactError, match=r"has format 1, this version reads \d+; compile the model again"):
        open_runtime(folder)


def test_verified_weights_are_remembered_and_then_compared(tmp_path, eager_cache):
    shutil.copytree(eager_cache, tmp_path / "cache")
    shutil.copytree(TINY, tmp_path / "model")
    config = tiny_config(tmp_path / "cache", compile=EAGER, model={"path": str(tmp_path / "model")})
    verify = CompileOptions(verify_weights=True)
    weights = load_or_compile(config, None, verify).artifact.manifest.weights
    assert weights.are_hashed
    assert open_artifact(load_or_compile(config).folder).manifest.weights == weights
    load_or_compile(config, None, verify)
    path = tmp_path / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load_or_compile(config).was_cached, "data is not looked at"
    with pytest.raises(CheckpointError, match="the data has changed"):
        load_or_compile(config, None, verify)


def test_packed_weights_that_changed_are_found_when_asked(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "runtime")
    (path,) = (tmp_path / "runtime").glob("weights/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    manifest = open_artifact(tmp_path / "runtime").manifest
    with pytest.raises(CheckpointError, match="the data has changed"):
        manifest.weights.hashed(tmp_path / "runtime", lambda num_bytes: None)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        open_runtime(tmp_path / "runtime")


def change_bytes(path: Path, count: int) -> None:
    """In the middle of a weight, as a disk or a copy may."""
    data = bytearray(path.read_bytes())
    begin = len(data) // 2
    data[begin : begin + count] = bytes(byte ^ 0x11 for byte in data[begin : begin + count])
    path.write_bytes(data)


@pytest.mark.parametrize("count", [1, 2000])
def test_packed_weights_that_changed_are_not_served(packed, tmp_path, count):
    folder = tmp_path / "runtime"
    shutil.copytree(packed, folder)
    (path,) = folder.glob("weights/*.safetensors")
    change_bytes(path, count)
    with pytest.raises(DamagedWeightsError, match=r"packed-00001\.safetensors: '.*' is not what was packed"):
        tokens(folder)


def test_packed_weights_that_changed_are_compiled_anew_where_a_config_asks(tmp_path, capsys):
    model = {"path": str(shallow_tiny(tmp_path / "model"))}
    config = tiny_config(tmp_path / "cache", compile=EAGER, model=model)
    packed = load_or_compile(config, None, CompileOptions(pack_weights=True)).folder
    expected = tokens(config)
    (path,) = packed.glob("weights/*.safetensors")
    change_bytes(path, 2000)
    with pytest.raises(typer.Exit):
        verify_command(tmp_path / "cache")
    assert "the data has changed" in capsys.readouterr().out
    assert tokens(config) == expected
    assert not packed.exists()
    assert load_or_compile(config).was_cached


@pytest.mark.parametrize("name", ["weights/packed-00001.safetensors", "measured/cpu.json", "tokenizer/tokenizer.json"])
def test_a_file_that_others_may_write_to_is_refused_wherever_it_is(packed, tmp_path, name):
    folder = tmp_path / "runtime"
    shutil.copytree(packed, folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    (folder / name).chmod(0o666)
    with pytest.raises(ArtifactError, match=rf"{name} can be written by others"):
        open_runtime(folder)
    if os.geteuid() == 0:
        (folder / name).chmod(0o644)
        os.chown(folder / name, 12345, -1)
        with pytest.raises(ArtifactError, match=rf"{name} belongs to user id 12345"):
            open_runtime(folder)


def test_whoever_swaps_the_folder_after_the_check_changes_nothing(packed, tmp_path, monkeypatch):
    """Weights, tokenizer, generation_config.json and measurements are those that were checked."""
    folder = tmp_path / "runtime"
    shutil.copytree(packed, folder)
    with Engine(folder) as engine:
        expected = engine.generate(PROMPT, GREEDY)[0].outputs[0]
        params = engine.default_params

    def check_then_swap(source: Path, reporter: object = None) -> CompiledRuntime:
        checked = open_runtime(source, reporter)
        folder.rename(tmp_path / "elsewhere")
        shutil.copytree(tmp_path / "elsewhere", folder)
        change_bytes(next(folder.glob("weights/*.safetensors")), 2000)
        (folder / "tokenizer" / "tokenizer.json").write_text("{}")
        (folder / "tokenizer" / "chat_template.jinja").write_text("{{ evil }}")
        (folder / "generation_config.json").write_text('{"temperature": 0.123, "eos_token_id": 5}')
        for path in folder.glob("measured/*"):
            path.write_text("{}")
        return checked

    monkeypatch.setattr("mllm_compile.engine.start.assemble.open_runtime", check_then_swap)
    with Engine(folder) as engine:
        assert engine.default_params == params
        answer = engine.generate(PROMPT, GREEDY)[0].outputs[0]
    assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
    assert (folder / "tokenizer" / "tokenizer.json").read_text() == "{}"


def test_an_output_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is no runtime: it is not replaced"):
        load_or_compile(tiny_config(tmp_path / "cache", compile=EAGER), None, CompileOptions(output=tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_nothing_beside_the_output_folder_is_left(packed):
    assert [path.name for path in packed.parent.iterdir()] == ["runtime"]
    modes = {path.stat().st_mode & 0o777 for path in [packed, *packed.rglob("*")]}
    assert modes == {0o755, 0o644}
