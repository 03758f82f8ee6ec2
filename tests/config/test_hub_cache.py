"""A model in the hub's cache, without the network: it is found where all that is read of it is there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
import pytest

from mllm_compile.config.folders.model_folder import ModelFolder, open_model_folder
from mllm_compile.config.schema import ModelConfig
from mllm_compile.errors import ModelNotFoundError
from tests.tiny_model import TINY

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "generation_config.json")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put(cache: Path, files: tuple[str, ...], more: tuple[str, ...], refs: bool = True, name: str = "m") -> Path:
    """Files of the embedded model as a snapshot, and a listing that names more of them."""
    repository = cache / f"models--org--{name}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in files:
        (repository / "blobs" / file).write_bytes((TINY / file).read_bytes() if (TINY / file).exists() else b"{}")
        os.symlink(f"../../blobs/{file}", snapshot / file)
    if refs:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
    (repository / "trees").mkdir()
    listed = {file: {"size": 1, "blob_id": "a" * 40} for file in (*files, *more)}
    (repository / "trees" / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": listed}))
    return snapshot


def find(revision: str | None = None, **keys: str) -> ModelFolder:
    return open_model_folder(ModelConfig.model_validate({"path": "org/m", "revision": revision, **keys}))


UNNEEDED = {
    "texts": ("README.md", "vocab.json", "merges.txt", "LICENSE.txt", "all_results.json", "trainer_state.json"),
    "weights of other kinds": ("model.fp16.safetensors", "adapter_model.safetensors", "model.gguf"),
    "folders": ("original/consolidated.00.pth", "onnx/model.onnx", "runs/events.json"),
}


@pytest.mark.parametrize("more", UNNEEDED.values(), ids=UNNEEDED)
@pytest.mark.parametrize("revision", [None, COMMIT])
def test_a_listing_may_name_files_that_nobody_fetched(more, revision, cache):
    snapshot = put(cache, NEEDED, more, refs=revision is None)
    assert find(revision).weight_files == (snapshot / "model.safetensors",)


@pytest.mark.parametrize(
    "missing",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
        "generation_config.json",
        "chat_template.jinja",
        "preprocessor_config.json",
        "speech-lora/adapter_config.json",
        "speech-lora/adapter_model.safetensors",
    ],
)
def test_what_is_read_and_missing_is_named_with_the_next_step(missing, cache):
    put(cache, tuple(name for name in NEEDED if name != missing), (missing,))
    with pytest.raises(ModelNotFoundError) as refused:
        find()
    said = str(refused.value)
    assert f"lacks {missing!r}" in said
    assert "hf download org/m" in said
    assert "there is no such folder" not in said


def test_shards_that_are_missing_are_named(cache):
    shards = tuple(f"model-{number:05}-of-00002.safetensors" for number in (1, 2))
    snapshot = put(cache, (*NEEDED[:3], "model.safetensors.index.json"), shards)
    weight_map = {"a": shards[0], "b": shards[1]}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelNotFoundError, match=rf"lacks '{shards[0]}' and '{shards[1]}'"):
        find()


def test_random_weights_need_no_weight_file(cache):
    put(cache, NEEDED[:3], ("model.safetensors",))
    assert find(load_format="dummy").weight_files == ()


def test_a_tokenizer_of_another_kind_may_be_all_there_is(cache):
    put(cache, ("config.json", "model.safetensors", "tokenizer.model"), ("vocab.json",))
    assert find().weight_files


def test_a_proxy_that_fails_is_a_hub_that_cannot_be_reached(cache, monkeypatch):
    class ProxyError(huggingface_hub.errors.HTTPError):
        pass

    download = huggingface_hub.snapshot_download

    def fail(*args: Any, local_files_only: bool = False, **keys: Any) -> str:
        if local_files_only:
            return download(*args, local_files_only=True, **keys)
        raise ProxyError("407 Proxy Authentication Required")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match=r"hub cannot be reached \(407 Proxy"):
        find()
    put(cache, NEEDED, ())
    assert find().weight_files


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "/cache/blobs/x"), "No space left on device"),
        (PermissionError(13, "Permission denied", "/cache"), "Permission denied"),
    ],
)
def test_a_disk_that_fails_is_not_a_hub_that_cannot_be_reached(error, said, cache, monkeypatch):
    def fail(*args: object, **keys: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match=said) as refused:
        find()
    assert "cannot be reached" not in str(refused.value)
    assert "HF_HOME" in str(refused.value)
