"""From model.path to a folder that can be served from, and the errors without one."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import save_file

from mllm_compile.config.folders.model_folder import check_remote_code, open_model_folder
from mllm_compile.config.schema import ModelConfig
from mllm_compile.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from mllm_compile.media.files import PROCESSOR_FILES
from mllm_compile.text.tokenizer_files import EXPORTED_FILES, NAMED_TEMPLATES, OLDER_FILES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with one float16 weight and a config that names no dtype."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    save_file({"a": np.zeros(2, np.int64), "w": np.zeros((2, 2), np.float16)}, tmp_path / "model.safetensors")
    return tmp_path


def open_folder(path: Path | str, **keys: object):
    return open_model_folder(ModelConfig(path=str(path), **keys))


def add_to_config(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def test_a_local_folder_is_taken_as_it_is(folder):
    model = open_folder(folder)
    assert model.path == folder
    assert model.config["model_type"] == "qwen3"
    assert model.weight_files == (folder / "model.safetensors",)


def test_the_dtype_is_the_configs_else_the_first_float_weights(folder):
    assert open_folder(folder).checkpoint_dtype() == "float16"
    add_to_config(folder, torch_dtype="bfloat16")
    assert open_folder(folder).checkpoint_dtype() == "bfloat16"
    add_to_config(folder, text_config={"dtype": "float32"})
    assert open_folder(folder).checkpoint_dtype() == "float32"


def test_a_damaged_weight_file_is_named_when_its_dtype_is_needed(folder):
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or corrupt"):
        open_folder(folder).checkpoint_dtype()


def test_the_shards_match_the_index(folder):
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    save_file({"b": np.zeros(1, np.float32)}, folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-2.safetensors", "b": "model-1.safetensors"}}))
    assert [path.name for path in open_folder(folder).weight_files] == ["model-1.safetensors", "model-2.safetensors"]

    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 weight files are missing, first 'model-1.safetensors'"):
        open_folder(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_refused(folder, content):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json .* Download it again"):
        open_folder(folder)


def test_an_index_cannot_point_out_of_the_folder(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    with pytest.raises(CheckpointError, match="expected a file of the same folder"):
        open_folder(folder)


def test_a_folder_without_config_or_with_a_broken_one_is_refused(folder):
    (folder / "config.json").write_text("{oops")
    with pytest.raises(ModelNotFoundError, match="cannot be read as JSON"):
        open_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelNotFoundError, match="holds no JSON object"):
        open_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
        open_folder(folder)


def test_a_folder_without_weights_serves_dummy_weights_only(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no weights.*load_format: dummy"):
        open_folder(folder)
    assert open_folder(folder, load_format="dummy").weight_files == ()


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which is not read"):
        open_folder(folder)


@pytest.mark.parametrize(
    "keys",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 3}},
        {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
    ],
)
def test_a_checkpoint_quantised_in_a_way_that_is_not_read_is_refused_by_name(folder, keys):
    add_to_config(folder, **keys)
    with pytest.raises(CheckpointError, match=r"quantised.*gptq"):
        open_folder(folder)
    assert open_folder(folder, load_format="dummy").scheme is None


def test_random_weights_are_as_plain_as_their_config_but_for_experts_in_mxfp4(folder):
    add_to_config(folder, quantization_config={"quant_method": "fp8"})
    assert open_folder(folder).scheme.name == "fp8"
    assert open_folder(folder, load_format="dummy").scheme is None
    add_to_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert open_folder(folder, load_format="dummy").scheme == open_folder(folder).scheme
    assert open_folder(folder).scheme.name == "mxfp4"


def test_a_path_that_cannot_be_a_hub_id_is_no_folder(folder):
    for path in ("./none", str(folder / "none"), "a/b/c", "~/no/such/model", "not a model!"):
        with pytest.raises(ModelNotFoundError, match="there is no such folder"):
            open_folder(path)
    with pytest.raises(ModelNotFoundError, match="is a file"):
        open_folder(folder / "config.json")
    with pytest.raises(ModelNotFoundError, match="neither a folder nor a hub id"):
        open_folder("two--dashes")


def test_a_local_folder_has_no_revisions(folder):
    with pytest.raises(ModelNotFoundError, match=r"Remove model\.revision"):
        open_folder(folder, revision="main")


def test_an_unreachable_hub_says_what_to_put_in_the_path(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"hub cannot be reached.*Give a local folder"):
        open_folder("Qwen/Qwen3-0.6B")


def test_a_hub_id_fetches_only_what_is_served_from(monkeypatch, folder):
    calls = []

    def fake_download(repo_id, **kwargs):
        calls.append({"repo_id": repo_id, "ignore_patterns": [], **kwargs})
        return str(folder)

    def is_fetched(name):
        return any(
            any(fnmatch(name, pattern) for pattern in call["allow_patterns"])
            and not any(fnmatch(name, pattern) for pattern in call["ignore_patterns"])
            for call in calls
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    assert open_folder("Qwen/Qwen3-0.6B", revision="v1").path == folder
    assert {call["repo_id"] for call in calls} == {"Qwen/Qwen3-0.6B"}
    assert [call["revision"] for call in calls] == ["v1", folder.name]  # the second time by the snapshot's commit
    for name in (*EXPORTED_FILES, *OLDER_FILES, *PROCESSOR_FILES, "model.safetensors"):
        assert is_fetched(name), name
    speech = [f"speech-lora/adapter_{name}" for name in ("config.json", "model.safetensors")]
    assert all(map(is_fetched, (f"{NAMED_TEMPLATES}/tool_use.jinja", *speech)))
    assert not any(map(is_fetched, ("modeling.py", "original/model.safetensors", "onnx/config.json")))

    calls.clear()
    open_folder("Qwen/Qwen3-0.6B", load_format="dummy", trust_remote_code=True)
    assert is_fetched("modeling.py") and not any(map(is_fetched, ("model.safetensors", *speech)))


def test_code_that_comes_with_a_model_needs_permission_only_where_transformers_has_none(folder):
    add_to_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    check_remote_code(open_folder(folder), trust_remote_code=False)
    add_to_config(folder, model_type="my_own")
    with pytest.raises(UnsupportedModelError, match=r"'my_own'.*trust_remote_code: true"):
        check_remote_code(open_folder(folder), trust_remote_code=False)
    check_remote_code(open_folder(folder), trust_remote_code=True)


def test_an_index_that_names_no_possible_file_is_refused(folder):
    names = {"w": "x" * 300 + ".safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match=r"names 'x+\.\.\.; expected a file of the same folder"):
        open_folder(folder)
