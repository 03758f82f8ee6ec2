"""Every architecture that is read: config and weights of a GGUF file make the model that it was written of."""

from __future__ import annotations

import gguf
import pytest
import torch

from mllm_compile.checkpoint.plan import plan_weights, read_checkpoint
from mllm_compile.checkpoint.tensors import read_model_tensors
from mllm_compile.config.model_folder import open_model_folder
from mllm_compile.config.schema import ModelConfig
from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.gguf.architectures import ARCHITECTURES
from mllm_compile.runtime.weights.loader import allocate_weights, load_weights
from tests.gguf.writer import MODELS, tiny_model, write_model

Q = gguf.GGMLQuantizationType
MIXED = [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.F16, Q.BF16, Q.F32]


def mixed(name: str) -> gguf.GGMLQuantizationType:
    """Files mix types: another for each tensor."""
    return MIXED[sum(name.encode()) % len(MIXED)]


def opened(path, tmp_path):
    return open_model_folder(ModelConfig(path=str(path)), str(tmp_path / "cache"))


def loaded(folder):
    """Transformers' model of a folder's config, with the weights that a runtime would read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder.path), dtype=torch.float32).eval()
    table = read_checkpoint(read_model_tensors(folder), model)
    state = model.state_dict(keep_vars=True)
    specs = plan_weights({name: (tuple(state[name].shape), torch.float32) for name in table}, {}, table)
    weights = allocate_weights(specs, "cpu")
    load_weights(specs, weights, folder.path)
    with torch.no_grad():
        for name, value in weights.items():
            state[name].copy_(value)
    return model


@torch.no_grad()
def logits(model):
    generator = torch.Generator().manual_seed(3)
    return model(torch.randint(0, 100, (2, 40), generator=generator), use_cache=False).logits


def test_every_architecture_is_written():
    names = {name.partition(" ")[0] for name in MODELS} - {"mixtral"}
    assert names == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_one_that_was_written(name, tmp_path):
    model = tiny_model(name)
    write_model(model, name, tmp_path / "model.gguf", mixed)
    folder = opened(tmp_path / "model.gguf", tmp_path)
    read = loaded(folder)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in read.state_dict().items())
    assert torch.allclose(logits(read), logits(model), rtol=1e-5, atol=1e-5)


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba9")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="architecture 'mamba9' are not read; read are command-r, gemma"):
        opened(tmp_path / "model.gguf", tmp_path)


def test_a_key_that_may_change_the_model_is_refused(tmp_path):
    write_model(tiny_model("llama"), "llama", tmp_path / "model.gguf", llama__attention__clamp_kqv=8.0)
    with pytest.raises(UnsupportedModelError, match=r"llama\.attention\.clamp_kqv \(8\.0\) is not read"):
        opened(tmp_path / "model.gguf", tmp_path)


def test_sizes_that_do_not_fit_the_tensors_are_refused(tmp_path):
    write_model(tiny_model("llama"), "llama", tmp_path / "model.gguf", llama__vocab_size=100)
    with pytest.raises(CheckpointError, match=r"llama\.vocab_size is 100, but token_embd\.weight has 128 rows"):
        opened(tmp_path / "model.gguf", tmp_path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        ({"type": "none"}, {"rope_type": "default"}),
    ],
)
def test_rotary_embeddings_are_scaled_as_the_file_says(keys, expected, tmp_path):
    metadata = {f"qwen3__rope__scaling__{key}": value for key, value in keys.items()}
    write_model(tiny_model("qwen3"), "qwen3", tmp_path / "model.gguf", **metadata)
    rope = opened(tmp_path / "model.gguf", tmp_path).config["rope_parameters"]
    assert rope == expected | {"rope_theta": rope["rope_theta"]}
