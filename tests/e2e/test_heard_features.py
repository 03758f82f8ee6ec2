"""Sounds with every other feature, as docs/sounds.md tells it: answers are Transformers', or the sound is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from mllm_compile import Engine, SamplingParams, StructuredOutputsParams
from mllm_compile.errors import RequestError
from mllm_compile.media.sources import read_items
from tests.media.heard_cases import SOUND, SOUND_ID, make_folder
from tests.sample import sample_of
from tests.sounds import tone, wav_of
from tests.stand_in_timm import standing_in
from tests.tiny_sounds import Patches, Sound, save_sound_model, sound_config, sound_prompt, transformers_greedy
from tests.tiny_vision import vision_engine_config

KIND, COUNT = "qwen2_audio", 6
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
WORKS: dict[str, Any] = {
    "speculative.method": {"speculative": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "lora.max_adapters": {"lora": {"max_adapters": 2, "max_rank": 4}},
    "runtime.tensor_parallel_size": {"runtime": {"tensor_parallel_size": 2}},
    "runtime.deterministic": {"runtime": {"deterministic": True}},
    "runtime.enable_sleep_mode": {"runtime": {"enable_sleep_mode": True}},
    "runtime.kv_offloading_size": {"runtime": {"kv_offloading_size": 0.002}},
}
TEXT_ALONE: dict[str, Any] = {
    "runtime.pipeline_parallel_size": {"runtime": {"pipeline_parallel_size": 2}},
    "runtime.skip_compiled": {"runtime": {"skip_compiled": True}},
}
NOT_OF_CLIPS = ("runtime.tensor_parallel_size",)  # of Gemma 3n
USUAL = sample_of(tuple(WORKS), 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_sound_model(KIND, folder / "model")


def config_of(folder: Path, sections: dict[str, Any]) -> dict[str, Any]:
    given = vision_engine_config(folder / "model", folder / "cache").model_dump(mode="json")
    return given | {name: {**(given.get(name) or {}), **section} for name, section in sections.items()}


def test_the_page_names_what_is_tried() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sounds.md").read_text(encoding="utf-8")
    for ending, tried in ((" | works |", WORKS), (" | text alone |", TEXT_ALONE)):
        rows = [line for line in page.splitlines() if line.startswith("| `") and line.endswith(ending)]
        assert {name for line in rows for name in re.findall(r"`(\w+\.\w+)`", line)} == set(tried)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.slow) for n in WORKS])
def test_what_works_with_sounds(folder: Path, model: Any, name: str) -> None:
    prompts = [sound_prompt(KIND, [5, 6], Sound(1, 48), [7], Sound(2, 30), [8]), [3, 4, 5]]
    expected = [transformers_greedy(model, prompt, COUNT) for prompt in prompts]

    def answers(engine: Any) -> list[list[int]]:
        return [list(output.token_ids) for output in engine.generate(prompts, GREEDY)]

    with Engine(config_of(folder, WORKS[name])) as engine:
        assert answers(engine) == expected
        if name == "runtime.enable_sleep_mode":
            engine.sleep(1)
            engine.wake_up()
        assert answers(engine) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(
            ("gemma4", name)
            for name in ("speculative.method", "runtime.enable_sleep_mode", "runtime.kv_offloading_size")
        ),
        *(("gemma3n", name) for name in WORKS if name not in NOT_OF_CLIPS),
    ],
)
def test_a_conformer_beside_images_works_with_them(tmp_path: Path, kind: str, name: str) -> None:
    with standing_in():
        check_both(tmp_path, kind, name)


def check_both(folder: Path, kind: str, name: str) -> None:
    """A sound and an image in one prompt, beside a text."""
    model = save_sound_model(kind, folder / "model")
    both = [5, 86], Sound(1, 37), [87, 92], Patches(2, 4, 6), [93, 8]
    prompts = [sound_prompt(kind, *both), [3, 4, 5]]
    expected = [transformers_greedy(model, prompt, COUNT) for prompt in prompts]
    with Engine(config_of(folder, WORKS[name])) as engine:
        for _ in range(2):
            assert [list(output.token_ids) for output in engine.generate(prompts, GREEDY)] == expected
            if name == "runtime.enable_sleep_mode":
                engine.sleep(1)
                engine.wake_up()


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT_ALONE)
def test_where_text_alone_is_served_a_sound_is_refused(folder: Path, model: Any, name: str) -> None:
    prompt = sound_prompt(KIND, [5], Sound(1, 48), [7])
    with Engine(config_of(folder, TEXT_ALONE[name])) as engine:
        with pytest.raises(RequestError, match=f"{re.escape(name)} is set, under which text alone is served"):
            engine.generate(prompt, GREEDY)
        (answer,) = engine.generate([[3, 4, 5]], GREEDY)
        assert answer.token_ids == transformers_greedy(model, [3, 4, 5], COUNT)


def test_a_chat_with_a_wav_file_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """From the file to the answer, by the model's own processor; and beside log-probabilities, `n` and a grammar."""
    given = sound_config("qwen3_asr").to_dict()
    given["audio_config"] |= {"num_mel_bins": 80}
    given["text_config"] |= {"vocab_size": 288}
    config = AutoConfig.for_model(**given | {"audio_token_id": SOUND_ID})
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight[: SOUND_ID + 3] = 0
    model.save_pretrained(tmp_path / "model")
    saved = (tmp_path / "model" / "config.json").read_bytes()
    make_folder(tmp_path / "model", "qwen3_asr")
    (tmp_path / "model" / "config.json").write_bytes(saved)
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 0}')
    parts = [{"type": "audio", "audio": wav_of(tone(1.3))}, {"type": "text", "text": "What?"}]
    messages: Any = [{"role": "user", "content": parts}]
    with Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache")) as engine:
        (answer,) = engine.chat(messages, SamplingParams(temperature=0, max_tokens=COUNT, logprobs=1))
        chosen = StructuredOutputsParams(choice=["yes", "no"])
        (formed,) = engine.chat(messages, SamplingParams(temperature=0, max_tokens=8, structured_outputs=chosen))
        (several,) = engine.chat(messages, SamplingParams(temperature=1.0, seed=0, n=3, max_tokens=3))
        made = engine.media.prepare(_text_of(messages), _items_of(parts), False)  # type: ignore[union-attr]
    assert answer.prompt_token_ids == made.prompt_token_ids
    assert answer.token_ids == transformers_greedy(model, made, COUNT)
    assert len(answer.outputs[0].logprobs or ()) == COUNT
    assert formed.text in ("yes", "no")
    assert len(several.outputs) == 3


def _text_of(messages: Any) -> str:
    return f"{SOUND}{messages[0]['content'][1]['text']}:"


def _items_of(parts: list[dict[str, Any]]) -> Any:
    return read_items({"audio": parts[0]["audio"]}, local_paths=False)
