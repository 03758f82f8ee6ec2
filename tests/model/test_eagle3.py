"""EAGLE-3 heads, as Speculators' format has them: numbers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile.config.folders.speculators import read_head
from mllm_compile.errors import CheckpointError, MllmError, UnsupportedModelError
from mllm_compile.model.attention_hook import attention_implementation
from mllm_compile.model.heads import build_head_on_meta
from mllm_compile.runtime.program.projection import Projection
from tests.eagle_heads import eagle_numbers, head_config, random_tensors

MODEL = {
    "hidden_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 3,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True, "draft_vocab_size": 30},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 3]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_heads_numbers_are_those_of_its_format(variant, tmp_path):
    config = head_config(MODEL, **VARIANTS[variant])
    tensors = random_tensors(config, seed=4)
    (tmp_path / "config.json").write_text(json.dumps(config))
    built = build_head_on_meta(tmp_path, torch.float32)
    model = built.model.to_empty(device="cpu")
    for name, value in built.constants.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, value)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not missing and set(unexpected) <= {"t2d"}
    ids = torch.tensor([3, 1, 4, 1, 5, 9])
    read = torch.randn(len(ids), tensors["fc.weight"].shape[1], generator=torch.Generator().manual_seed(2))
    hidden, logits, own = eagle_numbers(config, tensors, ids, read)
    projected = Projection.of(built.projection, dict(model.named_parameters()))(read)
    torch.testing.assert_close(projected, hidden, rtol=1e-4, atol=1e-5)
    given_on = []
    library = torch.ops.mllm.hidden_state
    with torch.no_grad(), attention_implementation(model, "eager"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.mllm, "hidden_state", lambda x, place: given_on.append(x) or library(x, place))
        found = model(input_ids=ids[None], hidden_states=projected[None]).logits[0]
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given_on[0][0], own, rtol=1e-4, atol=1e-4)


WRONG: dict[str, tuple[dict[str, Any], type[MllmError], str]] = {
    "another kind": ({"speculators_model_type": "medusa"}, UnsupportedModelError, "a head of kind 'medusa'"),
    "a model": ({"speculators_model_type": None}, UnsupportedModelError, "is a model's: expected"),
    "ids": ({"eagle_aux_hidden_state_layer_ids": [1, "2"]}, CheckpointError, "expected numbers of layers"),
    "a flag": ({"norm_before_residual": 1}, CheckpointError, "norm_before_residual is 1; expected true or false"),
    "a size": ({"draft_vocab_size": -1}, CheckpointError, "draft_vocab_size is -1; expected a positive number"),
    "no layers": (
        {"transformer_layer_config": 3},
        CheckpointError,
        "transformer_layer_config is 3; expected a section with a model_type",
    ),
    "both norms": ({"fc_norm": True, "norm_before_fc": True}, CheckpointError, "false beside norm_before_fc"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_config_of_no_such_head_is_refused(case):
    changes, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        read_head(head_config(MODEL, **changes), Path("head/config.json"))


@pytest.mark.parametrize("layers", [{"model_type": "gpt2"}, {"model_type": "nope"}, {"num_hidden_layers": 0}])
def test_layers_that_are_none_of_a_head_are_refused(layers, tmp_path):
    config = head_config(MODEL)
    config["transformer_layer_config"] |= layers
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError):
        build_head_on_meta(tmp_path, torch.float32)


@pytest.mark.parametrize(("ids", "layers"), [([0, 1, 4], 3), ([-1, 1, 2], 3), ([1, 1, 2], 3), (None, 2)])
def test_layers_that_the_model_has_not_are_refused(ids, layers):
    head = read_head(head_config(MODEL, eagle_aux_hidden_state_layer_ids=ids), Path("config.json"))
    with pytest.raises(UnsupportedModelError, match=f"the model has {layers} layers: expected different numbers"):
        head.places(layers)


def test_a_head_that_names_no_layers_reads_those_of_the_format():
    head = read_head(head_config(MODEL, eagle_aux_hidden_state_layer_ids=None), Path("config.json"))
    assert (head.num_read, head.places(36)) == (3, (2, 18, 33))
