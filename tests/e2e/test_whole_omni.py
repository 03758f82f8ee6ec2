"""Folders of whole Omni models, which also speak: the thinker is served, as Transformers computes it by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import CheckpointError, UnsupportedModelError
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.sample import sample_of
from tests.tiny_sounds import Patches, Sound, save_sound_model, sound_prompt, transformers_greedy
from tests.tiny_vision import vision_engine_config

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OTHERS = {"qwen2_5_omni": ("talker", "token2wav"), "qwen3_omni_moe": ("talker", "code2wav")}
USUAL = sample_of(tuple(OTHERS), 1)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | changes))


def save_whole(kind: str, folder: Path, others: tuple[str, ...]) -> Any:
    """Writes a folder as the whole model's, whose other parts hold one tensor each; returns its thinker."""
    thinker = save_sound_model(f"{kind}_thinker", folder)
    weights = load_file(folder / "model.safetensors")
    named = {f"thinker.{name}": tensor for name, tensor in weights.items()}
    save_file(named | {f"{name}.weight": torch.zeros(2) for name in others}, folder / "model.safetensors")
    config = {"model_type": kind, "thinker_config": json.loads((folder / "config.json").read_bytes())}
    (folder / "config.json").write_text(json.dumps(config))
    return thinker


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one in USUAL else pytest.mark.slow) for one in OTHERS])
def test_the_thinker_of_a_whole_model_answers(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mllm_compile")
    thinker = save_whole(kind, tmp_path / "model", OTHERS[kind])
    parts = [5, 86], Sound(1, 130), [87, 92], Patches(2, 4, 6), [93, 7]
    prompts = [sound_prompt(f"{kind}_thinker", *parts), [3, 4, 5]]
    with Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache")) as engine:
        answers = [list(output.token_ids) for output in engine.generate(prompts, GREEDY)]
    assert answers == [transformers_greedy(thinker, prompt, 6) for prompt in prompts]
    assert f"its answers are text: its {' and its '.join(OTHERS[kind])} are not used" in caplog.text


def test_a_tensor_of_no_part_is_named(tmp_path: Path) -> None:
    save_whole("qwen2_5_omni", tmp_path / "model", ("singer",))
    with pytest.raises(CheckpointError, match=r"tensor 'singer\.weight' has no place"):
        Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache"))


def test_weights_that_are_quantised_as_the_whole_config_says_are_not_taken_for_plain(tmp_path: Path) -> None:
    save_whole("qwen2_5_omni", tmp_path / "model", OTHERS["qwen2_5_omni"])
    change_config(tmp_path / "model", quantization_config={"quant_method": "hqq"})
    with pytest.raises(CheckpointError, match=r"quantised .*hqq.*: its method is not read"):
        Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache"))


@pytest.mark.parametrize("section", [{}, {"model_type": "llama"}, [3], "x"], ids=str)
def test_a_thinker_of_a_model_that_has_none_is_refused(section: Any, tmp_path: Path) -> None:
    save_tiny_model(tiny_config("llama"), tmp_path / "model")
    change_config(tmp_path / "model", thinker_config=section)
    with pytest.raises(UnsupportedModelError, match=r"is of a 'llama' model, which has no thinker_config"):
        Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache"))
