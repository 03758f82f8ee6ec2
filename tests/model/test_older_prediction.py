"""Prediction layers by versions of Transformers whose MtpModel has fewer methods: the same as by these methods."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.older_prediction import check_names, conversions_of, run_layer
from tests.model.tiny_configs import tiny_config

NEWER = ("forward_layer", "get_weight_conversions")


@pytest.fixture(scope="module")
def main_model():
    config = tiny_config("glm4_moe")
    config.num_mtp_layers = 2
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def without_methods(monkeypatch) -> None:
    for name in NEWER:
        monkeypatch.delattr(MtpModel, name, raising=False)


def texts(conversions) -> list[tuple[str, ...]]:
    return [(type(one).__name__, str(one.source_patterns), str(one.target_patterns)) for one in conversions]


@pytest.mark.skipif(not all(hasattr(MtpModel, name) for name in NEWER), reason="needs Transformers 5.23")
def test_a_layer_and_its_conversions_are_those_of_newer_versions(main_model, monkeypatch):
    model, ids = MtpModel(main_model, 2).eval(), torch.arange(3, 10)[None]
    hidden, positions = torch.randn(1, 7, main_model.config.hidden_size), torch.arange(7)[None]
    with torch.no_grad():
        for parameter in model.layers.parameters():  # some are left as memory was
            parameter.normal_(std=0.1)
    given = [(model, number, hidden, positions, ids) for number in range(2)]
    with torch.no_grad():
        theirs, names = [run_layer(*one) for one in given], texts(conversions_of(model, main_model, 2))
        without_methods(monkeypatch)
        ours = [run_layer(*one) for one in given]
    assert not torch.equal(theirs[0], theirs[1])
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert texts(conversions_of(model, main_model, 2)) == names


def test_names_that_an_older_version_does_not_know_are_refused(monkeypatch):
    without_methods(monkeypatch)
    check_names("model.layers.4.eh_proj.weight")
    with pytest.raises(UnsupportedModelError, match=r"does not know where .*'mtp.fc.weight' belongs. Expected 5.23"):
        check_names("mtp.fc.weight")
