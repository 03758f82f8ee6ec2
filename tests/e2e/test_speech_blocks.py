"""Phi-4-multimodal's sounds, with its adapter for speech and without: against Transformers' own forward in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mllm_compile import Engine
from mllm_compile.media.sources import read_items
from tests.adapters.folders import matrices, peft_fields, write_adapter
from tests.e2e.test_heard_features import WORKS
from tests.fakes import all_pages_are_back
from tests.lora_factors import merged
from tests.media.heard_cases import SOUND, SOUND_ID, make_folder
from tests.own_adapter import ALPHA, COUNT, GREEDY, RANK, OwnAdapter, factors_of, tokens
from tests.sounds import tone, wav_of
from tests.tiny_sounds import Sound
from tests.tiny_speech import greedy, logprobs, save_speech_model, speech_prompt
from tests.tiny_vision import vision_engine_config

TEXT = [3, 4, 5, 6, 7]
PROMPTS: list[Any] = [
    speech_prompt([5, 6], Sound(1, 40), [7, 8]),
    TEXT,
    speech_prompt([11], Sound(4, 300), [12] * 5, Sound(2, 9), [4] * 3),
    speech_prompt([4, 3], Sound(5, 21)),  # the first token follows a feature
]
LONG = speech_prompt([5, 6], Sound(3, 4000 + 37), [7], Sound(6, 8 * 500), [8])  # two blocks, and one that is full


def save_speech(folder: Path) -> OwnAdapter:
    """The model in a folder, and its adapter for speech."""
    model = save_speech_model(folder / "model")
    shapes = {}
    for number, layer in enumerate(model.model.layers):
        shapes[f"model.layers.{number}.self_attn.qkv_proj"] = tuple(layer.self_attn.qkv_proj.weight.shape)
        shapes[f"model.layers.{number}.mlp.down_proj"] = tuple(layer.mlp.down_proj.weight.shape)
    tensors = matrices(shapes, RANK, 3)
    write_adapter(folder / "model/speech-lora", tensors, peft_fields(["qkv_proj", "down_proj"], RANK, lora_alpha=ALPHA))
    return OwnAdapter(folder, model, factors_of(tensors, {one: f"{one}.weight" for one in shapes}), greedy)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> OwnAdapter:
    return save_speech(tmp_path_factory.mktemp("speech"))


def test_prompts_with_sounds_have_the_adapter_and_others_none(speech: OwnAdapter) -> None:
    expected = [speech.expected(prompt) for prompt in PROMPTS]
    assert expected[0] != speech.expected(PROMPTS[0], is_adapted=False), "the adapter changes what is said"
    with Engine(speech.config()) as engine:
        assert [one.name for one in engine.list_adapters()] == ["sounds"]
        assert tokens(engine, PROMPTS * 2) == expected * 2
        before = engine.stats().prefix_hit_tokens
        assert [tokens(engine, [prompt])[0] for prompt in PROMPTS] == expected
        hits = engine.stats().prefix_hit_tokens
        assert hits > before
        assert tokens(engine, [{"prompt": PROMPTS[2], "cache_salt": "another"}]) == expected[2:3]
        assert engine.stats().prefix_hit_tokens == hits, "of another salt"
        (output,) = engine.generate(PROMPTS[2:3], replace(GREEDY, prompt_logprobs=0, max_tokens=1))
        assert all_pages_are_back(engine)
    ours = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    with merged(speech.model, speech.factors):
        assert np.abs(np.array(ours) - logprobs(speech.model, PROMPTS[2]).numpy()).max() < 1e-4


def test_steps_of_few_tokens_cut_sounds(speech: OwnAdapter) -> None:
    with Engine(speech.config(runtime={"max_num_batched_tokens": 9})) as engine:
        assert tokens(engine, PROMPTS) == [speech.expected(prompt) for prompt in PROMPTS]


def test_sounds_of_several_blocks(speech: OwnAdapter) -> None:
    with Engine(speech.config(runtime={"max_model_len": 2048, "max_num_batched_tokens": 1024})) as engine:
        assert tokens(engine, [LONG, *PROMPTS]) == [speech.expected(prompt) for prompt in (LONG, *PROMPTS)]


@pytest.mark.slow
def test_without_the_folder_of_the_adapter_sounds_are_computed_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_speech_model(tmp_path / "model")
    with Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache")) as engine:
        assert engine.list_adapters() == []
        assert "model has no speech-lora/adapter_config.json. Bring that folder, unless" in caplog.text
        assert tokens(engine, PROMPTS) == [greedy(model, prompt, COUNT) for prompt in PROMPTS]


def test_its_images_are_refused_by_name(speech: OwnAdapter) -> None:
    pixels = np.zeros((1, 2, 3, 16, 16), dtype=np.float32)
    item = replace(PROMPTS[0].items[0], kind="image", tensors={"image_pixel_values": pixels})
    with Engine(speech.config()) as engine:
        refused, text = engine.generate([replace(PROMPTS[0], items=(item,)), TEXT], GREEDY)
    assert "an item of the prompt has image_pixel_values; expected input_features" in str(refused.error)
    assert list(text.token_ids) == speech.expected(TEXT)


@pytest.mark.slow  # the pieces of text, text with features and tower
def test_a_compiled_runtime_hears(speech: OwnAdapter) -> None:
    given = vision_engine_config(speech.folder / "model", speech.folder / "compiled", "inductor")
    with Engine(given) as engine:
        assert tokens(engine, PROMPTS) == [speech.expected(prompt) for prompt in PROMPTS]


@pytest.mark.slow
def test_a_chat_with_a_wav_file_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    model = save_speech_model(tmp_path / "model", SOUND_ID, bins=80, vocab_size=288)
    saved = (tmp_path / "model/config.json").read_bytes()
    make_folder(tmp_path / "model", "phi4_multimodal")
    (tmp_path / "model/config.json").write_bytes(saved)
    wav = wav_of(tone(1.3))
    parts = [{"type": "audio", "audio": wav}, {"type": "text", "text": "What?"}]
    with Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache")) as engine:
        (answer,) = engine.chat([{"role": "user", "content": parts}], GREEDY)
        assert engine.media is not None
        made = engine.media.prepare(f"{SOUND}What?:", read_items({"audio": wav}, local_paths=False), False)
    assert answer.prompt_token_ids == made.prompt_token_ids
    assert answer.token_ids == greedy(model, made, COUNT)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_it_works_with_what_works_with_sounds(speech: OwnAdapter, name: str) -> None:
    expected = [speech.expected(prompt) for prompt in PROMPTS]
    with Engine(speech.config(**WORKS[name])) as engine:
        assert tokens(engine, PROMPTS) == expected
        if name == "runtime.enable_sleep_mode":
            engine.sleep(1)
            engine.wake_up()
        assert tokens(engine, PROMPTS) == expected
