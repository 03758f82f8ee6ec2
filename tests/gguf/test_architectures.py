"""Every architecture that is read: config and weights of a GGUF file make the model that it was written of."""

from __future__ import annotations

import gguf
import pytest
import torch

from mllm_compile.checkpoint.plan import as_linear, plan_weights, read_checkpoint, scheme_of
from mllm_compile.checkpoint.tensors import read_model_tensors
from mllm_compile.config.folders.model_folder import open_model_folder
from mllm_compile.config.schema import ModelConfig
from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.gguf.architectures import ARCHITECTURES
from mllm_compile.passes.base import QuantisedTensor
from mllm_compile.runtime.quantised.numbers import dequantised
from mllm_compile.runtime.quantised.scheme import tensor_name
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


def test_decoders_that_transformers_reads_are_read():
    newer = pytest.importorskip("transformers.integrations.gguf.gguf_config_mapping")
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    theirs = {*GGUF_CONFIG_MAPPING, *newer.GGUF_CONFIG_ARCHS} - {"general", "tokenizer"}
    found = {one.model_type.removesuffix("_text") for one in ARCHITECTURES.values()} | {*ARCHITECTURES}
    encoders, of_llamas, without_a_class = {"t5", "umt5"}, {"mistral"}, {"deci"}
    assert theirs - found <= encoders | of_llamas | without_a_class


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_one_that_was_written(name, tmp_path):
    model = tiny_model(name)
    write_model(model, name, tmp_path / "model.gguf", mixed)
    folder = opened(tmp_path / "model.gguf", tmp_path)
    read = loaded(folder)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in read.state_dict().items())
    assert torch.allclose(logits(read), logits(model), rtol=1e-5, atol=1e-5)


def test_experts_in_mxfp4_are_the_numbers_of_the_file(tmp_path):
    model = tiny_model("gpt-oss")
    write_model(model, "gpt-oss", tmp_path / "model.gguf", lambda name: Q.MXFP4 if "_exps" in name else mixed(name))
    expected = model.state_dict()
    read = loaded(opened(tmp_path / "model.gguf", tmp_path)).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in read.items())


@pytest.mark.parametrize("kind", [Q.MXFP4, Q.Q4_1], ids=lambda kind: kind.name)
def test_experts_lie_in_memory_as_the_numbers_of_the_file(kind, tmp_path):
    model = tiny_model("gpt-oss")
    write_model(model, "gpt-oss", tmp_path / "model.gguf", lambda name: kind if "_exps" in name else Q.F32)
    folder, weights = opened(tmp_path / "model.gguf", tmp_path), dict(model.named_parameters())
    table = read_checkpoint(read_model_tensors(folder), model)
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        scheme, rows = scheme_of(as_linear(table[name], True)), weights[name].transpose(1, 2)
        told = {
            tensor_name(name, role): QuantisedTensor(name, role, scheme, tuple(rows.shape), is_transposed=True)
            for role in scheme.roles
        }
        shapes = {one: (scheme.shape(of.role, *rows.shape), scheme.dtype(of.role)) for one, of in told.items()}
        specs = plan_weights(shapes, {}, table, told)
        found = allocate_weights(specs, "cpu")
        load_weights(specs, found, folder.path)
        by_role = {of.role: found[one] for one, of in told.items()}
        assert torch.equal(dequantised(by_role, scheme.kind, scheme.group, rows.shape[-1], torch.float32), rows)


def test_gate_and_up_of_experts_may_be_of_two_types(tmp_path):
    model = tiny_model("gpt-oss")
    write_model(model, "gpt-oss", tmp_path / "model.gguf", lambda name: Q.Q8_0 if "gate_exps" in name else Q.F16)
    expected = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    read = loaded(opened(tmp_path / "model.gguf", tmp_path)).state_dict()
    assert torch.equal(read["model.layers.0.mlp.experts.gate_up_proj"], expected)


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba9")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="architecture 'mamba9' are not read; read are bloom, command-r, "):
        opened(tmp_path / "model.gguf", tmp_path)


def test_a_key_that_may_change_the_model_is_refused(tmp_path):
    write_model(tiny_model("llama"), "llama", tmp_path / "model.gguf", llama__attention__clamp_kqv=8.0)
    with pytest.raises(UnsupportedModelError, match=r"llama\.attention\.clamp_kqv \(8\.0\) is not read"):
        opened(tmp_path / "model.gguf", tmp_path)


def test_sizes_that_do_not_fit_the_tensors_are_refused(tmp_path):
    write_model(tiny_model("llama"), "llama", tmp_path / "model.gguf", llama__vocab_size=100)
    with pytest.raises(CheckpointError, match=r"llama\.vocab_size is 100, but token_embd\.weight has 128 rows"):
        opened(tmp_path / "model.gguf", tmp_path)


REFUSED = {
    "experts of another width": ("gpt-oss", {"expert_feed_forward_length": 8}, "feed_forward_length is 96"),
    "another choice of experts": ("minimax-m2", {"expert_gating_func": 1}, "expected 2, sigmoid"),
    "convolutions alone": ("lfm2", {"attention__head_count_kv": 0}, "one number for all layers that attend"),
    "layers of other heads": ("lfm2", {"attention__head_count_kv": [1, 2, 2, 2]}, "one number for all layers that"),
    "values without keys": ("qwen35", {"ssm__group_count": 0}, "4 value heads of 0 key heads"),
    "values of no whole heads": ("qwen35", {"ssm__inner_size": 63}, "ssm.time_step_rank is 4"),
    "layers too few": ("lfm2", {"attention__head_count_kv": [0, 2]}, "expected 4 numbers"),
    "two norms for one key": ("falcon", {"attention__head_count_kv": 1}, "several KV heads"),
    "heads that do not fit": ("falcon", {"attention__head_count_kv": 3}, "4 heads for 3 KV heads"),
    "a narrow MLP": ("bloom", {"feed_forward_length": 64}, "expected 256"),
    "no heads": ("bloom", {"attention__head_count": 0}, "attention.head_count is 0"),
    "an MLP of any width": ("gemma4", {"feed_forward_length": [96, 96, 96, 192]}, "twice the width"),
    "values of another size": ("gemma4", {"attention__value_length_swa": 8}, "key_length_swa is 16"),
    "a part of a head": ("gemma4", {"rope__dimension_count_swa": 8}, "expected 16, the size of a head"),
    "no layer of all tokens": ("gemma4", {"attention__sliding_window_pattern": [True] * 4}, "one number for layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_architecture_is_not_served_with_is_refused_in_one_line(name, tmp_path):
    model, keys, message = REFUSED[name]
    keys = {f"{model}__{key}": value for key, value in keys.items()}
    write_model(tiny_model(model), model, tmp_path / "model.gguf", **keys)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as error:
        read_model_tensors(opened(tmp_path / "model.gguf", tmp_path))
    assert "\n" not in str(error.value)


def test_a_part_of_an_experts_tensors_is_refused(tmp_path):
    write_model(tiny_model("gpt-oss"), "gpt-oss", tmp_path / "model.gguf")
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data.replace(b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_xx_exps.weight"))
    with pytest.raises(CheckpointError, match="layer 1 lacks experts' gate or up"):
        read_model_tensors(opened(tmp_path / "model.gguf", tmp_path))


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
