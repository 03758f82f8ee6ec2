"""Where a GGUF file is taken: as a file, in parts, in a folder; what becomes of it in the cache."""

from __future__ import annotations

import os
import shutil

import gguf
import pytest

from mllm_compile import Engine
from mllm_compile.config.folders.model_folder import open_model_folder
from mllm_compile.config.schema import ModelConfig
from mllm_compile.config.sources import config_or_runtime
from mllm_compile.errors import CheckpointError, ConfigError, ModelNotFoundError
from mllm_compile.runtime.weights.gguf_header import read_gguf
from tests.gguf.test_tokenizers import byte_level, metadata
from tests.gguf.writer import add_value, tiny_model, write_model

Q = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model = tiny_model("qwen3")
    write_model(model, "qwen3", path, lambda name: Q.Q8_0 if "ffn" in name else Q.Q4_1)
    return path, model


def opened(path, cache):
    return open_model_folder(ModelConfig(path=str(path)), str(cache))


def split(path, folder, count=2):
    """The file in parts, as llama.cpp's gguf-split makes them: the first has the metadata."""
    reader = gguf.GGUFReader(path)
    folder.mkdir()
    tensors = list(reader.tensors)
    for part in range(count):
        writer = gguf.GGUFWriter(folder / f"tiny-{part + 1:05}-of-{count:05}.gguf", "qwen3")
        if part == 0:
            for key, field in reader.fields.items():
                if not key.startswith(("GGUF.", "general.architecture")):
                    add_value(writer, key, field.contents())
        for key, value in (("split.no", part), ("split.count", count)):
            writer.add_uint16(key, value)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in tensors[part::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return folder


def test_a_file_a_folder_and_parts_are_taken(file, tmp_path):
    path, _ = file
    parts = split(path, tmp_path / "parts")
    config = opened(path, tmp_path / "cache").config
    for place in (path.parent, parts, parts / "tiny-00001-of-00002.gguf", parts / "tiny-00002-of-00002.gguf"):
        assert opened(place, tmp_path / "cache").config == config
    assert len(opened(parts, tmp_path / "cache").weight_files) == 2
    assert config_or_runtime(path).model.path == str(path)
    assert config_or_runtime(path.parent).model.path == str(path.parent)


def test_parts_have_the_tensors_of_the_whole(file, tmp_path):
    from mllm_compile.checkpoint.tensors import read_model_tensors

    path, _ = file
    whole = read_model_tensors(opened(path, tmp_path / "cache"))
    parts = read_model_tensors(opened(split(path, tmp_path / "parts"), tmp_path / "cache"))
    assert parts.planned.keys() == whole.planned.keys()


def test_a_missing_part_is_named(file, tmp_path):
    parts = split(file[0], tmp_path / "parts", 3)
    os.unlink(parts / "tiny-00002-of-00003.gguf")
    with pytest.raises(CheckpointError, match=r"1 of 3 parts are missing, first tiny-00002-of-00003\.gguf"):
        opened(parts, tmp_path / "cache")


def test_parts_that_were_renamed_are_refused(file, tmp_path):
    parts = split(file[0], tmp_path / "parts")
    os.rename(parts / "tiny-00001-of-00002.gguf", parts / "alone.gguf")
    with pytest.raises(CheckpointError, match="is part 0 of 2 by its header, and one of 1 by its name"):
        opened(parts / "alone.gguf", tmp_path / "cache")


def test_safetensors_win_over_a_gguf_file_beside_them(file, tmp_path, caplog):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    shutil.copy(file[0], tmp_path / "model")
    with caplog.at_level("INFO", "mllm_compile.config"):
        folder = opened(tmp_path / "model", tmp_path / "cache")
    assert folder.path == tmp_path / "model"
    assert "holds safetensors and GGUF: the former are read" in caplog.text


def test_files_beside_a_model_are_left_out_by_their_names(file, tmp_path, caplog):
    for name in ("tiny.gguf", "tiny-mmproj-f16.gguf", "mmproj-F16.gguf", "imatrix.gguf"):
        shutil.copy(file[0], tmp_path / name)
    with caplog.at_level("INFO", "mllm_compile.gguf"):
        folder = opened(tmp_path, tmp_path / "cache")
    assert [one.name for one in folder.weight_files] == ["tiny.gguf"]
    assert "tiny.gguf is taken, and imatrix.gguf, mmproj-F16.gguf, tiny-mmproj-f16.gguf left out" in caplog.text


def test_several_models_in_a_folder_are_refused(file, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(file[0], tmp_path / name)
    with pytest.raises(ModelNotFoundError, match=r"holds several GGUF models or none whole \(a\.gguf, b\.gguf\)"):
        opened(tmp_path, tmp_path / "cache")


def test_a_file_that_is_gone_is_named_by_its_own_path(file, tmp_path):
    path = tmp_path / "tiny.gguf"
    shutil.copy(file[0], path)
    (link,) = opened(path, tmp_path / "cache").weight_files
    path.unlink()
    with pytest.raises(CheckpointError, match=f"^cannot read {path}: No such file"):
        read_gguf(link)


def test_a_changed_file_gets_a_folder_of_its_own(file, tmp_path):
    path = tmp_path / "tiny.gguf"
    shutil.copy(file[0], path)
    first = opened(path, tmp_path / "cache").path
    assert opened(path, tmp_path / "cache").path == first
    os.utime(path, (1, 1))
    assert opened(path, tmp_path / "cache").path != first


def test_the_folder_has_a_tokenizer_and_a_template(tmp_path):
    values = metadata(byte_level("gpt-2"), "gpt2", pre="gpt-2", eos_token_id=2)
    tokens = [one.decode() for one in values["tokenizer.ggml.tokens"][:127]]
    values |= {"tokenizer.ggml.tokens": [*tokens, "he"], "tokenizer.ggml.token_type": [3] * 3 + [1] * 125}
    values |= {"tokenizer.ggml.merges": ["h e"], "tokenizer.chat_template": "{{ messages }}"}
    write_model(tiny_model("qwen3"), "qwen3", tmp_path / "a.gguf", **values)
    folder = opened(tmp_path / "a.gguf", tmp_path / "cache")
    names = {one.name for one in folder.path.iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "a.gguf"}


def test_more_bits_are_not_taken_away(file, tmp_path):
    config = {"model": {"path": str(file[0]), "quantization": "int4"}, "cache": {"dir": str(tmp_path)}}
    with pytest.raises(ConfigError, match="quantised already"):
        Engine(config | {"runtime": {"device": "cpu"}})


def test_a_warm_start_parses_a_header_once(file, tmp_path, monkeypatch):
    from mllm_compile.checkpoint.files import weight_files
    from mllm_compile.runtime.weights import gguf_header

    opened(file[0], tmp_path / "cache")
    gguf_header._read.cache_clear()
    folder = opened(file[0], tmp_path / "cache")
    weight_files(folder.path, folder.weight_files)
    assert gguf_header._read.cache_info().misses == 1
