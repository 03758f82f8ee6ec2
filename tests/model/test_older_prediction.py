"""Prediction layers by versions of Transformers whose MtpModel has fewer methods: the same as by these methods."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from mllm_compile.model import older_prediction
from mllm_compile.model.older_prediction import QWEN_NAMES, conversions_of, run_layer
from tests.model.tiny_configs import tiny_config

NEWER = ("forward_layer", "get_weight_conversions")
pytestmark = pytest.mark.skipif(not all(hasattr(MtpModel, name) for name in NEWER), reason="needs Transformers 5.23")


def main_model_of(architecture: str):
    config = tiny_config(architecture)
    config.num_mtp_layers = 2
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = ["full_attention"] * 2
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def be_older(monkeypatch, model) -> None:
    """Takes from Transformers what 5.17 lacks."""
    for name in NEWER:
        monkeypatch.delattr(MtpModel, name)
    mapping = older_prediction.get_model_conversion_mapping

    def without_names_of_qwen(*args, **said):
        return [one for one in mapping(*args, **said) if not {*one.source_patterns} & {*QWEN_NAMES}]

    monkeypatch.setattr(older_prediction, "get_model_conversion_mapping", without_names_of_qwen)
    rotate = type(model.rotary_emb).forward

    def of_three_positions(rotary, x, position_ids):
        assert position_ids.ndim == (3 if hasattr(rotary, "mrope_section") else 2)
        return rotate(rotary, x, position_ids)

    monkeypatch.setattr(type(model.rotary_emb), "forward", of_three_positions)


def texts(conversions) -> list[tuple[str, ...]]:
    return [(type(one).__name__, str(one.source_patterns), str(one.target_patterns)) for one in conversions]


@pytest.mark.parametrize("architecture", ["glm4_moe", "qwen3_5_text", "qwen3_5_moe_text"])
def test_a_layer_and_its_conversions_are_those_of_newer_versions(architecture, monkeypatch):
    main_model = main_model_of(architecture)
    model, ids = MtpModel(main_model, 2).eval(), torch.arange(3, 10)[None]
    hidden, positions = torch.randn(1, 7, main_model.config.hidden_size), torch.arange(7)[None]
    with torch.no_grad():
        for parameter in model.layers.parameters():  # some are left as memory was
            parameter.normal_(std=0.1)
    given = [(model, number, hidden, positions, ids) for number in range(2)]
    with torch.no_grad():
        theirs, names = [run_layer(*one) for one in given], texts(conversions_of(model, main_model, 2))
        be_older(monkeypatch, model)
        ours = [run_layer(*one) for one in given]
    assert not torch.equal(theirs[0], theirs[1])
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert texts(conversions_of(model, main_model, 2)) == names
