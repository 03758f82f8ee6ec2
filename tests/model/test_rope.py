"""RoPE that follows the longest text of a batch is made to follow each token's own, and only where that is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.resolution.resolve import longest_text
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model import rope_hook
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.rope_hook import choosing_rope, follow_rope
from mllm_compile.runtime.schedule.rope_lengths import RopeLengths
from tests.model.tiny_configs import tiny_config

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def longest(config: dict[str, Any]) -> int | None:
    return longest_text(ModelFolder(Path("m"), config, ()))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": 256}, 256),
        ({"rope_parameters": LONGROPE, "max_position_embeddings": 256}, 256),
        ({"rope_parameters": DYNAMIC, "max_position_embeddings": 256}, 512),
        ({"rope_scaling": {"type": "dynamic", "factor": 1.5}, "max_position_embeddings": 100}, 150),
        ({"rope_parameters": DYNAMIC}, None),
    ],
)
def test_dynamic_makes_a_model_longer(config, length):
    assert longest(config) == length


@pytest.mark.parametrize(
    ("architecture", "rope", "lengths"),
    [
        ("llama", LONGROPE, RopeLengths(64, of_each_length=False, recomputes=False)),
        ("llama", DYNAMIC, RopeLengths(256, of_each_length=True, recomputes=False)),
        ("phi3", LONGROPE, RopeLengths(64, of_each_length=False, recomputes=True)),
        ("llama", {"rope_type": "default", "rope_theta": 10000.0}, None),
    ],
)
def test_a_model_says_how_its_frequencies_follow_lengths(architecture, rope, lengths):
    config = tiny_config(architecture, rope_parameters=rope, original_max_position_embeddings=64)
    built = build_config_on_meta(config, torch.float32)
    assert built.rope == lengths
    added = [name for name in built.constants if name.endswith("_texts")]
    assert bool(added) == (lengths is not None)


@pytest.mark.parametrize(
    ("architecture", "rope"),
    [("llama", LONGROPE), ("llama", DYNAMIC), ("phimoe", LONGROPE | {"short_mscale": 1.5, "long_mscale": 2.0})],
    ids=["longrope", "dynamic", "scales"],
)
def test_each_token_is_rotated_as_in_a_text_of_its_own_length(architecture, rope):
    from transformers import AutoModelForCausalLM

    config = tiny_config(architecture, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config)
    follow_rope(model)
    boundary = rope.get("original_max_position_embeddings", config.max_position_embeddings)
    positions = torch.tensor([[5, 5, 5, boundary + 9]])
    lengths = torch.tensor([[0, boundary + 3, 3 * boundary, 0]])  # the last token goes by its position
    with choosing_rope(model, lambda _: lengths):
        ours = model.model.rotary_emb(torch.zeros(1), positions)
    for token, length in enumerate((6, boundary + 3, 3 * boundary, boundary + 10)):
        text = torch.tensor([[int(positions[0, token]), length - 1]])
        alone = AutoModelForCausalLM.from_config(
            config
        ).model.rotary_emb  # made anew: it keeps the longest text's so far
        theirs = alone(torch.zeros(1), text)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one[:, token], other[:, 0])
    assert not torch.equal(ours[0][0, 0], ours[0][0, 1])


def test_keys_are_shared_among_lengths_of_the_same_frequencies():
    longrope = RopeLengths(64, of_each_length=False, recomputes=False)
    dynamic = RopeLengths(64, of_each_length=True, recomputes=False)
    assert [longrope.frequencies_of(length) for length in (1, 64, 65, 200)] == [0, 0, 65, 65]
    assert [dynamic.frequencies_of(length) for length in (1, 64, 65, 200)] == [0, 0, 65, 200]
    # Of a short prompt those within the boundary; of a long one's answer all, or none.
    assert [longrope.num_alike(*lengths) for lengths in ((10, 30), (10, 90), (70, 90))] == [30, 64, 90]
    assert [dynamic.num_alike(*lengths) for lengths in ((10, 30), (10, 90), (70, 90))] == [30, 64, 70]


def test_an_embedding_that_reads_more_than_frequencies_is_refused(monkeypatch):
    scales = {"short_mscale": 1.5, "long_mscale": 2.0}
    # Scales of a name that is known, which the embedding does not apply.
    config = tiny_config("llama", rope_parameters=LONGROPE | scales)
    with pytest.raises(UnsupportedModelError, match=r"rope_type 'longrope' .* no cosine and sine of each angle"):
        build_config_on_meta(config, torch.float32)
    monkeypatch.setattr(rope_hook, "_SCALES", ("scale",))
    config = tiny_config("phimoe", rope_parameters=LONGROPE | scales)
    with pytest.raises(UnsupportedModelError, match=r"rope_type 'longrope' .* PhimoeRotaryEmbedding.forward reads"):
        build_config_on_meta(config, torch.float32)
