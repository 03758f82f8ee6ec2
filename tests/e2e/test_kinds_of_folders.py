"""Model folders of every kind that is taken, served: in shards, untied, with no tokenizer, with no weights at all."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.errors import RequestError
from tests.tiny_model import shallow_tiny, tiny_config

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
PROMPT = [5, 300, 42, 7]
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model's first layer."""
    return shallow_tiny(tmp_path / "model")


def config_of(folder: Path, **model: Any) -> EngineConfig:
    return tiny_config(
        folder.parent / "cache", model={"path": str(folder)} | model, compile={"backend": "eager"}, runtime={"seed": 3}
    )


def answer(config: EngineConfig, params: SamplingParams | None = GREEDY, prompt: list[int] | str = PROMPT) -> Any:
    with Engine(config) as engine:
        return engine.generate(prompt, params)[0]


def change_json(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture(scope="module")
def plain_tokens(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The folder's own answer."""
    return answer(config_of(shallow_tiny(tmp_path_factory.mktemp("plain") / "model"))).token_ids


def test_weights_in_shards_are_the_same_weights(folder, plain_tokens):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(3):
        part = dict(list(tensors.items())[number::3])
        save_file(part, folder / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert answer(config_of(folder)).token_ids == plain_tokens


def test_a_head_of_its_own_is_used_where_the_config_unties_it(folder, plain_tokens):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": -tensors[EMBEDDING]}, folder / "model.safetensors")
    change_json(folder / "config.json", tie_word_embeddings=False)
    assert answer(config_of(folder)).token_ids != plain_tokens
    save_file(tensors | {"lm_head.weight": tensors[EMBEDDING].clone()}, folder / "model.safetensors")
    assert answer(config_of(folder)).token_ids == plain_tokens


def test_a_head_of_its_own_is_used_where_the_config_ties_it_too(folder, plain_tokens):
    """As in Transformers, which ties only what is the same."""
    tensors = load_file(folder / "model.safetensors")
    other_head = tensors[EMBEDDING].roll(1, 0)
    save_file(tensors | {"lm_head.weight": other_head}, folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    tokens = answer(config_of(folder)).token_ids
    assert tokens != plain_tokens
    config = config_of(folder)
    of_transformers = config.model_copy(update={"runtime": config.runtime.model_copy(update={"skip_compiled": True})})
    assert tokens == answer(of_transformers).token_ids
    save_file(tensors | {"lm_head.weight": tensors[EMBEDDING].clone()}, folder / "model.safetensors")
    assert answer(config_of(folder)).token_ids == plain_tokens


def test_a_checkpoint_in_another_type_is_converted(folder, plain_tokens):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value.to(torch.float32) for name, value in tensors.items()}, folder / "model.safetensors")
    assert answer(config_of(folder)).token_ids == plain_tokens


def test_without_a_tokenizer_prompts_are_token_ids(folder, plain_tokens):
    for path in folder.glob("*token*.json"):
        path.unlink()
    output = answer(config_of(folder))
    assert (output.token_ids, output.text) == (plain_tokens, "")
    with pytest.raises(RequestError, match="no tokenizer; give the prompt as token ids"):
        answer(config_of(folder), prompt="text")


def test_a_config_alone_serves_seeded_random_weights(folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    first = answer(config_of(bare, load_format="dummy"))
    assert answer(config_of(bare, load_format="dummy")).token_ids == first.token_ids
    reseeded = config_of(bare, load_format="dummy")
    reseeded = reseeded.model_copy(update={"runtime": reseeded.runtime.model_copy(update={"seed": 4})})
    assert answer(reseeded).token_ids != first.token_ids


def test_the_models_own_sampling_is_for_requests_that_bring_none(folder, plain_tokens):
    change_json(folder / "generation_config.json", do_sample=False, max_new_tokens=5)
    assert answer(config_of(folder), None).token_ids == plain_tokens[:5]
    assert answer(config_of(folder), GREEDY).token_ids == plain_tokens


def test_any_of_the_models_end_tokens_ends_an_answer(folder, plain_tokens):
    change_json(folder / "generation_config.json", eos_token_id=[3000, plain_tokens[4]])
    output = answer(config_of(folder))
    assert output.finish_reason == "stop"
    assert output.token_ids == plain_tokens[: plain_tokens.index(plain_tokens[4]) + 1]
    ignored = answer(config_of(folder), replace(GREEDY, ignore_eos=True))
    assert (ignored.finish_reason, ignored.token_ids) == ("length", plain_tokens)
