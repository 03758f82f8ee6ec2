"""generation_config.json: where an answer ends and how to sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mllm_compile.errors import ConfigError
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.text.generation_defaults import load_generation_defaults


def defaults(folder: Path, generation: object = None, config: object = None):
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return load_generation_defaults(folder)


def test_a_list_of_end_tokens_is_kept_whole(tmp_path):
    assert defaults(tmp_path, {"eos_token_id": [7, 9]}, {"eos_token_id": 1}).eos_token_ids == {7, 9}


def test_end_tokens_fall_back_to_the_config_and_its_text_part(tmp_path):
    assert defaults(tmp_path, {}, {"eos_token_id": 1}).eos_token_ids == {1}
    assert defaults(tmp_path, None, {"text_config": {"eos_token_id": [2, 3]}}).eos_token_ids == {2, 3}
    assert defaults(tmp_path, None, {"eos_token_id": None}).eos_token_ids == frozenset()


def test_sampling_defaults_make_sampling_params(tmp_path):
    found = defaults(tmp_path, {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 9})
    assert found.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 9}
    assert SamplingParams(**found.sampling).top_k == 20


def test_do_sample_false_is_greedy(tmp_path):
    found = defaults(tmp_path, {"do_sample": False, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    assert found.sampling == {"temperature": 0.0, "repetition_penalty": 1.1}


def test_a_file_that_says_nothing_leaves_the_defaults(tmp_path):
    assert defaults(tmp_path, {"transformers_version": "5.0"}).sampling == {}


@pytest.mark.parametrize("eos", ["</s>", [1, -2], [True], 1.5])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path, eos):
    with pytest.raises(ConfigError, match="eos_token_id is"):
        defaults(tmp_path, {"eos_token_id": eos})


def test_end_tokens_are_bounded_in_number(tmp_path):
    assert len(defaults(tmp_path, {"eos_token_id": list(range(1024))}).eos_token_ids) == 1024
    with pytest.raises(ConfigError, match="eos_token_id lists 1,025 ids; expected at most 1024"):
        defaults(tmp_path, {"eos_token_id": list(range(1025))})


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read as JSON"):
        load_generation_defaults(tmp_path)
