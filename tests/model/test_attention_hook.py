"""The attention implementation is the whole model's, whatever Transformers' own way to set it leaves out."""

from __future__ import annotations

import pytest
import torch
import transformers

from mllm_compile.model.attention_hook import attention_implementation


def test_parts_with_copies_of_the_config_attend_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Transformers 5.17, which passes over T5's stacks."""

    def of_the_model_alone(self: transformers.PreTrainedModel, name: str) -> None:
        self.config._attn_implementation_internal = name

    monkeypatch.setattr(transformers.PreTrainedModel, "set_attn_implementation", of_the_model_alone)
    with torch.device("meta"):
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 8}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    parts = model, model.get_encoder(), model.get_decoder()
    before = [part.config._attn_implementation for part in parts]
    with attention_implementation(model, "eager"):
        assert [part.config._attn_implementation for part in parts] == ["eager"] * 3
    assert before != ["eager"] * 3 and [part.config._attn_implementation for part in parts] == before
