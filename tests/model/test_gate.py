"""The gate: every way of not being what it seems is refused, with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import UnsupportedModelError
from tests.model.tiny_configs import tiny_config
from tests.model.toy_models import ToyConfig, register_toy


def compile_toy(kind: str, tmp_path: Path):
    """A toy with random weights, through the whole compiler."""
    register_toy()
    return compile_config(ToyConfig(kind=kind), tmp_path)


def compile_config(config, tmp_path: Path):
    config.save_pretrained(tmp_path / "model")
    return load_or_compile(
        EngineConfig.from_dict(
            {
                "model": {"path": str(tmp_path / "model"), "load_format": "dummy"},
                "compile": {"backend": "eager"},
                "runtime": {"device": "cpu", "max_model_len": 64},
                "cache": {"dir": str(tmp_path / "cache")},
            }
        )
    )


@pytest.mark.parametrize(
    ("kind", "window_left"),
    [
        ("plain", -1),
        ("window in call and mask", 999),
        ("window in the mask alone", 999),
        ("chunks in the mask alone", -1),
        ("no head count", -1),
        ("written out", -1),
        ("written out with a window of its own", 3),
    ],
)
def test_a_model_without_a_flaw_passes(kind, window_left, tmp_path):
    (layer,) = compile_toy(kind, tmp_path).artifact.program.layers
    assert layer.window_left == window_left
    assert layer.chunk == (1000 if kind == "chunks in the mask alone" else 0)


REASONS = {
    "direct attention": r"calls scaled_dot_product_attention directly, past the attention interface",
    "own scores": "no attention goes through Transformers' attention interface; .* is a tokens × tokens tensor",
    "written out and sees all": "with two requests in one batch its logits are off by",
    "written out in chunks": "is a tokens × tokens tensor",
    "written out with a learned bias": "is a tokens × tokens tensor",
    "written out with a cap": "is a tokens × tokens tensor",
    "not causal": "its attention passes attention that is not causal",
    "keyword of unknown meaning": "its attention passes keyword key_places",
    "window in the call alone": "its attention call sees 999 tokens back, its mask -1",
    "changes its mask": "the model changes its attention mask",
    "writes a buffer": r"writes into calls",
    "writes a view of a weight": r"writes into out\.weight",
    "branches on length": r"cannot be traced as one graph: it branches on the number of tokens: u0 > 16",
    "size that depends on data": "has a size that depends on data",
    "constant of unknown value": r"buffer 'scale' is in no checkpoint, and the model's _init_weights does not fill it",
    "logits of every token": "it takes no tensor of rows as logits_to_keep",
    "keeps what it computed": "it keeps 1 values from one forward to the next",
    "state from token to token": "with two requests in one batch its logits are off by",
    "convolution": "with two requests in one batch its logits are off by",
    "own positions": "with two requests in one batch its logits are off by",
    "cannot be built": "'toy' .*: layers per zero",
    "raises": "no such layer",
    "no vocabulary size": "config.json of this 'toy' model says no vocab_size",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_flaw_is_refused_with_its_reason_in_one_line(kind, tmp_path):
    with pytest.raises(UnsupportedModelError, match=REASONS[kind]) as refused:
        compile_toy(kind, tmp_path)
    assert "\n" not in str(refused.value)
    assert torch.get_default_dtype() is torch.float32


def test_an_encoder_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="its attention passes attention that is not causal"):
        compile_config(tiny_config("bert", is_decoder=False), tmp_path)


def test_reasons_that_differ_by_layer_alone_are_said_once(tmp_path):
    with pytest.raises(UnsupportedModelError) as refused:
        compile_config(tiny_config("bert", is_decoder=False), tmp_path)
    assert str(refused.value).count("attention that is not causal (bert.encoder.layer.0.attention.self)") == 1
    assert "layer.3" not in str(refused.value)
