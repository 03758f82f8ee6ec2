"""A model's folder, or a runtime's, that somebody made to hang, crash or fill the memory: one clear line, at once.

Nothing here measures time: work that is not refused at once does not end.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.checkpoint.files import weight_files
from mllm_compile.compiler.target import find_target
from mllm_compile.config.folders.model_folder import open_model_folder
from mllm_compile.config.schema import EngineConfig, ModelConfig
from mllm_compile.errors import ArtifactError, CheckpointError, ConfigError, MllmError
from mllm_compile.files.sealed_json import write_sealed
from mllm_compile.runtime.weights.header import read_header
from mllm_compile.store.artifact import is_runtime, open_artifact, read_manifest
from mllm_compile.text.generation_defaults import load_generation_defaults
from mllm_compile.text.tokenizer import load_tokenizer
from tests.tiny_model import TINY, tiny_config

DEEP = b"[" * 100_000
WIDE = b'{"a": [' + b"[]," * 2_000_000 + b"[]]}"
LONG_NUMBER = b'{"num_hidden_layers": ' + b"9" * 5000 + b"}"


def make_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link_to_zeros(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse


def holding(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


MAKERS = {
    "a fifo": make_fifo,
    "zeros without end": link_to_zeros,
    "a terabyte": make_huge,
    "deep": holding(DEEP),
    "wide": holding(WIDE),
    "a long number": holding(LONG_NUMBER),
}


def open_all(folder: Path) -> None:
    """Files that are read of a model before Transformers is imported."""
    model = open_model_folder(ModelConfig(path=str(folder)))
    weight_files(folder, model.weight_files)
    load_tokenizer(folder)
    load_generation_defaults(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").touch()
    open_all_but_text = open_model_folder(ModelConfig(path=str(tmp_path / "model")))
    assert open_all_but_text.weight_files
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    open_all(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.parametrize("made", MAKERS)
def test_a_file_of_a_model_is_refused_by_its_name(model, name, made):
    MAKERS[made](model / name)
    with pytest.raises(MllmError, match=rf"{name}") as refused:
        open_all(model)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "x.py"])
@pytest.mark.parametrize("made", ["a fifo", "zeros without end", "a terabyte"])
def test_a_file_that_the_key_or_transformers_alone_reads_is_refused_before_it_is_opened(model, tmp_path, name, made):
    MAKERS[made](model / name)
    config = tiny_config(tmp_path / "cache", model={"path": str(model), "trust_remote_code": True})
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: it (is no regular file|has more than)"):
        find_target(config)


@pytest.mark.parametrize("made", MAKERS)
def test_an_index_is_refused_by_its_name(model, made):
    MAKERS[made](model / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_all(model)


def test_an_index_of_a_hundred_thousand_files_is_refused_before_they_are_looked_for(model, monkeypatch):
    names = {f"w{i}": f"model-{i}.safetensors" for i in range(100_000)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match="names 100,000 files; expected at most 10,000"):
        open_all(model)


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "num_layers", "decoder_layers"])
@pytest.mark.parametrize("number", [10**5, 10**9, 10**30])
@pytest.mark.parametrize("sections", ["", "text_config", "thinker_config text_config", "beside a thinker_config"])
def test_a_config_of_endlessly_many_layers_is_refused(model, name, number, sections):
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    changes: dict[str, Any] = {name: number}
    if sections.startswith("beside"):
        changes["thinker_config"] = {}
    else:
        for section in reversed(sections.split()):
            changes = {section: changes}
    config |= changes
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(MllmError, match=rf"{name} is {number}; expected at most 1000"):
        open_all(model)


@pytest.mark.parametrize(
    ("eos", "said"), [([10**30, 0], "others end answers"), (4000, "answers end at max_tokens or a stop text")]
)
def test_end_tokens_beyond_the_vocabulary_fail_no_step(model, tmp_path, caplog, eos, said):
    """min_tokens forbids columns of a table: a missing one failed all requests of the step."""
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    config = tiny_config(tmp_path / "cache", model={"path": str(model)}, compile={"backend": "eager"})
    with caplog.at_level(logging.WARNING, "mllm_compile.progress"), Engine(config) as engine:
        plain, late = engine.generate(
            [[5, 6, 7]] * 2,
            [SamplingParams(temperature=0, max_tokens=4, min_tokens=least) for least in (0, 3)],
        )
    assert len(plain.outputs[0].token_ids) == len(late.outputs[0].token_ids) == 4, (plain.error, late.error)
    assert f"beyond the model's vocabulary of 3072 and never sampled: {said}" in caplog.text


def write_header(path: Path, header: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (DEEP, "nested more than"),
        (b'{"a":{"dtype":"F32","shape":[' + b"1," * 3_000_000 + b"1]}}", "more than 2,000,000 values"),
        (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', "an integer of 5000 digits"),
        (b'{"a":{"dtype":"F32","shape":[' + b"9" * 30 + b'],"data_offsets":[0,8]}}', "has shape"),
        (b'{"a":{"dtype":"F32","shape":[' + b"1," * 64 + b'1],"data_offsets":[0,4]}}', "has shape"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[' + b"0," * 9999 + b"8]}}", "at "),
        (b'{"a":{"dtype":' + b'"' + b"F" * 100_000 + b'"}}', "has dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_header_beyond_a_bound_is_one_line(tmp_path, header, said):
    write_header(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match=said) as refused:
        read_header(tmp_path / "model.safetensors")
    assert len(str(refused.value)) < 1000


@pytest.fixture
def runtime(eager_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(eager_folder, tmp_path / "runtime")
    return tmp_path / "runtime"


def fields_of(manifest: dict[str, Any]) -> list[tuple[str, ...]]:
    """The path to every field that a type is given to."""
    file, weights = next(iter(manifest["files"])), next(iter(manifest["weights"]["files"]))
    inner = [("sizes", name) for name in manifest["sizes"]] + [("weights", name) for name in manifest["weights"]]
    files = [("files", file), ("files", file, "sha256"), ("files", file, "num_bytes")]
    return [(name,) for name in manifest if name != "format"] + inner + files + [("weights", "files", weights)]


def test_every_field_of_a_manifest_is_checked_by_its_type(runtime):
    whole = read_manifest(runtime).to_json()
    for path in fields_of(whole):
        for value in (None, 5, True, "text", [5], {"k": 5}, 1.5):
            damaged = json.loads(json.dumps(whole))
            parent = damaged
            for name in path[:-1]:
                parent = parent[name]
            if type(parent[path[-1]]) is type(value) and value != "text":
                continue
            if parent[path[-1]] == value or (path[-1] in ("sha256", "folder") and value == "text"):
                continue
            if path[-1] in ("factors", "config", "about") and value == {"k": 5}:
                continue
            parent[path[-1]] = value
            write_sealed(runtime / "manifest.json", damaged)
            with pytest.raises(ArtifactError, match=rf"is not what this version writes \({path[0]}"):
                open_artifact(runtime)


@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize("name", ["manifest.json", "program.json"])
def test_a_file_of_a_runtime_is_refused(runtime, name, made):
    MAKERS[made](runtime / name)
    with pytest.raises(ArtifactError):
        open_artifact(runtime)
    with pytest.raises(ArtifactError):
        open_artifact(runtime)
    assert is_runtime(runtime)


def test_a_runtime_of_folders_in_folders_is_refused(runtime):
    handle = os.open(runtime, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=handle)
        handle, parent = os.open("d", os.O_RDONLY, dir_fd=handle), handle
        os.close(parent)
    os.close(handle)
    try:
        with pytest.raises(ArtifactError, match="is no file that this version writes"):
            open_artifact(runtime)
    finally:
        remove_deep(runtime)


def remove_deep(folder: Path) -> None:
    """shutil.rmtree is recursive: folders are moved up until none is in another."""
    while (folder / "d" / "d").exists():
        os.rename(folder / "d" / "d", folder / "e")
        os.rmdir(folder / "d")
        os.rename(folder / "e", folder / "d")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000,
        "model: {path: " + "9" * 5000 + "}",
        "model: 2001-99-99",
        "a: &a [x]\n"
        + "".join(f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in pairwise("abcdefghij")),
        "x" * (2 << 20),
    ],
    ids=["deep", "a long number", "no date", "aliases", "large"],
)
def test_a_yaml_is_refused_in_one_short_line(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_yaml(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 2000


def test_a_yaml_without_end_is_refused():
    with pytest.raises(ConfigError, match="more than 1,048,576 characters"):
        EngineConfig.from_yaml("/dev/zero")
