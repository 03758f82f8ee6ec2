"""Weights in formats that are not read are called what they are, with the way that leads on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mllm_compile.config.folders.model_folder import open_model_folder
from mllm_compile.config.schema import ModelConfig
from mllm_compile.config.sources import config_or_runtime
from mllm_compile.errors import CheckpointError, MllmError

GGUF = b"GGUF" + bytes(range(256))


def open_folder(path: Path) -> None:
    open_model_folder(ModelConfig(path=str(path)))


@pytest.mark.parametrize("name", ["no suffix", "model.bin", "config.yaml"])
def test_a_gguf_file_is_known_by_its_first_bytes_whatever_its_name(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(GGUF)
    for give in (config_or_runtime, open_folder):
        with pytest.raises(MllmError, match=r"is a GGUF file\. Give it a name that ends in \.gguf"):
            give(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.safetensors", r"in safetensors\. Give the folder that holds it"),
        ("pytorch_model.bin", "pickles can run code"),
        ("consolidated.00.pth", "pickles can run code"),
    ],
)
def test_other_weight_files_are_called_what_they_are(name, said, tmp_path):
    (tmp_path / name).write_bytes(b"\x80\x02" * 20)
    for give in (config_or_runtime, open_folder):
        with pytest.raises(MllmError, match=said):
            give(tmp_path / name)


def test_a_snapshot_of_a_gguf_repository_says_so(tmp_path):
    snapshot = tmp_path / "models--org--Model-GGUF" / "snapshots" / "x"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="a repository of GGUF files by its name"):
        open_folder(snapshot)


MLX = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization": MLX},
        {"quantization": MLX, "quantization_config": MLX},
        {"quantization_config": MLX | {"mode": "affine"}},
        {"text_config": {"quantization": MLX}},
    ],
)
def test_a_folder_that_mlx_has_quantised_is_called_so(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"quantised by MLX \(4 bits, groups of 64\).*mlx-lm serves it"):
        open_folder(tmp_path)


def test_a_pipe_of_a_config_is_read_once(tmp_path):
    import os
    import threading

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("model: {path: somewhere}"))
    writer.start()
    config = config_or_runtime(pipe)
    writer.join()
    assert not isinstance(config, Path) and config.model.path.endswith("somewhere")
