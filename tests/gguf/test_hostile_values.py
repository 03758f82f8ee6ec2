"""Values of a file's keys that no model has: each is refused in one line, before anything is made as large."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.gguf.config import architecture_of, model_config
from mllm_compile.gguf.facts import ARCHITECTURE_KEY, ModelFacts
from mllm_compile.gguf.metadata import Metadata

SHAPES = {"token_embd.weight": (64, 32)}
SIZES = {"block_count": 2, "embedding_length": 32, "context_length": 64, "feed_forward_length": 48}
HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6}


def config_of(architecture: str, **changes: object) -> dict:
    keys = {**SIZES, **HEADS, **{key.replace("__", "."): value for key, value in changes.items()}}
    values = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    metadata = Metadata(Path("m.gguf"), {ARCHITECTURE_KEY: architecture, **values})
    return model_config(ModelFacts(metadata, SHAPES, lambda name: []), architecture_of(metadata, SHAPES))


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("llama", {"block_count": 2**31}, "block_count is 2147483648; expected a whole number up to 1000"),
        ("lfm2", {"block_count": 2**31}, "expected a whole number up to 1000"),
        ("llama", {"block_count": 0}, "expected a whole number"),
        ("llama", {"block_count": 2.5}, "expected a whole number"),
        ("llama", {"block_count": math.nan}, "expected a finite number, got nan"),
        ("llama", {"rope__freq_base": math.inf}, "expected a finite number, got inf"),
        ("llama", {"attention__head_count": 2**63}, "expected a finite number"),
        ("lfm2", {"attention__head_count_kv": (math.nan, 2)}, "expected a finite number"),
        ("gpt-oss", {"feed_forward_length": None}, r"lacks the key gpt-oss\.feed_forward_length"),
        ("qwen35", {"full_attention_interval": 2}, r"lacks the key qwen35\.ssm\.time_step_rank"),
    ],
)
def test_values_that_no_model_has_are_refused_in_one_line(architecture, changes, said):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said) as error:
        config_of(architecture, **changes)
    assert "\n" not in str(error.value)


def test_the_other_values_are_read():
    assert config_of("llama")["num_hidden_layers"] == 2
