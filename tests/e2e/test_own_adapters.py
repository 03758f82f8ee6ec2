"""Granite Speech with its own adapter, which computes prompts with sounds alone: against Transformers, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine
from mllm_compile.errors import RequestError
from tests.adapters.folders import matrices, peft_fields, write_adapter
from tests.e2e.test_heard_features import WORKS
from tests.lora_factors import merged
from tests.own_adapter import ALPHA, COUNT, GREEDY, RANK, OwnAdapter, factors_of, tokens
from tests.tiny_sounds import Sound, save_sound_model, sound_prompt, transformers_greedy
from tests.tiny_vision import vision_engine_config

KIND = "granite_speech"
NAME = "language_model.model.layers.{}.self_attn.{}_proj"  # as in the published files
PROMPTS: list[Any] = [
    sound_prompt(KIND, [5, 6], Sound(1, 12), [7, 8]),
    [3, 4, 5, 6, 7],
    sound_prompt(KIND, [11], Sound(4, 31), [12] * 5, Sound(2, 9), [4] * 3),
]


def say_has_own(folder: Path) -> None:
    """As Transformers says it: by leaving the key out."""
    path = folder / "config.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    del said["has_lora_adapter"]
    path.write_text(json.dumps(said), encoding="utf-8")


def save_heard(folder: Path) -> OwnAdapter:
    """The model in a folder, and its adapter beside its weights."""
    model = save_sound_model(KIND, folder / "model")
    shapes = {}
    for layer in range(model.config.text_config.num_hidden_layers):
        of_layer = model.model.language_model.layers[layer].self_attn
        shapes |= {NAME.format(layer, one): tuple(getattr(of_layer, f"{one}_proj").weight.shape) for one in "qv"}
    tensors = matrices(shapes, RANK, 3)
    fields = peft_fields(["q_proj", "v_proj"], RANK, lora_alpha=ALPHA, base_model_name_or_path="ibm/granite-chat")
    write_adapter(folder / "model", tensors, fields)
    say_has_own(folder / "model")
    names = {one: f"{one.replace('language_model.model.', 'model.language_model.')}.weight" for one in shapes}
    return OwnAdapter(folder, model, factors_of(tensors, names), transformers_greedy)


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> OwnAdapter:
    return save_heard(tmp_path_factory.mktemp("own"))


def test_prompts_with_sounds_are_computed_with_the_adapter_and_others_without(heard: OwnAdapter) -> None:
    expected = [heard.expected(prompt) for prompt in PROMPTS]
    assert expected[0] != heard.expected(PROMPTS[0], is_adapted=False), "the adapter changes what is said"
    with Engine(heard.config()) as engine:
        assert [one.name for one in engine.list_adapters()] == ["sounds"]
        assert tokens(engine, PROMPTS * 2) == expected * 2
        before = engine.stats().prefix_hit_tokens
        assert [tokens(engine, [prompt])[0] for prompt in PROMPTS] == expected
        assert engine.stats().prefix_hit_tokens > before
        named = heard.expected(PROMPTS[1], is_adapted=True)
        assert tokens(engine, PROMPTS[1:2], adapter="sounds") == [named]


def test_a_named_adapter_is_in_its_place_and_without_one_a_sound_is_refused(heard: OwnAdapter, tmp_path: Path) -> None:
    shapes = {"model.language_model.layers.0.mlp.up_proj": (48, 32)}
    targets = heard.model.model.language_model.layers[0].mlp.up_proj.weight.shape
    shapes = {name: tuple(targets) for name in shapes}
    tensors = matrices(shapes, 4, 5)
    write_adapter(tmp_path / "other", tensors, peft_fields(["layers.0.mlp.up_proj"], 4, lora_alpha=4))
    (name,) = shapes
    pair = tuple(tensors[f"base_model.model.{name}.lora_{one}.weight"] for one in "AB")
    with merged(heard.model, {f"{name}.weight": pair}):
        other = transformers_greedy(heard.model, PROMPTS[0], COUNT)
    with Engine(heard.config(lora={"max_adapters": 1})) as engine:
        engine.load_adapter("other", tmp_path / "other")
        asked = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
        own = heard.expected(PROMPTS[0])
        assert tokens(engine, asked, adapter=["other", None, None]) == [other, own, heard.expected(PROMPTS[1])]
        engine.unload_adapter("sounds")
        with pytest.raises(RequestError, match="there is no adapter 'sounds'; loaded are other"):
            engine.generate(PROMPTS[0], GREEDY)


def test_without_its_files_sounds_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_sound_model(KIND, tmp_path / "model")
    say_has_own(tmp_path / "model")
    config = vision_engine_config(tmp_path / "model", tmp_path / "cache")
    with Engine(config) as engine, pytest.raises(RequestError, match="text alone"):
        engine.generate(PROMPTS[0], GREEDY)
    assert "model has no adapter_config.json: an adapter computes prompts with sounds" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_it_works_with_what_works_with_sounds(heard: OwnAdapter, name: str) -> None:
    expected = [heard.expected(prompt) for prompt in PROMPTS]
    with Engine(heard.config(**WORKS[name])) as engine:
        assert tokens(engine, PROMPTS) == expected
        if name == "runtime.enable_sleep_mode":
            engine.sleep(1)
            engine.wake_up()
        assert tokens(engine, PROMPTS) == expected


@pytest.mark.slow
def test_stages_serve_text_alone_and_no_adapters(heard: OwnAdapter) -> None:
    with Engine(heard.config(runtime={"pipeline_parallel_size": 2})) as engine:
        assert engine.list_adapters() == []
        assert tokens(engine, PROMPTS[1:2]) == [heard.expected(PROMPTS[1])]
