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


def test_what_generate_does_with_an_encoder_decoders_answers_is_sampled_so_or_named(tmp_path):
    config = {"is_encoder_decoder": True, "eos_token_id": 3, "decoder_start_token_id": 2, "vocab_size": 50}
    told = {"suppress_tokens": [7, 5, 99], "begin_suppress_tokens": [9, 3], "max_length": 40}
    found = defaults(tmp_path, {**told, "forced_eos_token_id": 3, "num_beams": 1, "no_repeat_ngram_size": 3}, config)
    greedy = {"temperature": 0.0}
    assert found.sampling == greedy | {"logit_bias": {5: -100.0, 7: -100.0}, "min_tokens": 1, "max_tokens": 39}
    assert found.not_applied == ("no_repeat_ngram_size", "forced_eos_token_id", "begin_suppress_tokens [9]")
    (tmp_path / "generation_config.json").unlink()  # as of older checkpoints
    assert defaults(tmp_path, None, config | told).sampling == found.sampling
    assert defaults(tmp_path, {"max_length": 40, "max_new_tokens": 9}, config).sampling == greedy | {"max_tokens": 9}
    sampled = {"do_sample": True, "top_k": 5, "temperature": 0.7}
    assert defaults(tmp_path, sampled, config).sampling == {"top_k": 5, "temperature": 0.7}
    (tmp_path / "generation_config.json").unlink()
    assert defaults(tmp_path, None, config | sampled).sampling == {"top_k": 5, "temperature": 0.7}
    of_another = defaults(tmp_path, {**told, "num_beams": 4}, config | {"is_encoder_decoder": False})
    assert (of_another.sampling, of_another.not_applied) == ({}, ())


@pytest.mark.parametrize("ids", ["7", [-1], [1.5], list(range(1025))])
def test_suppressed_tokens_that_are_no_ids_are_refused(tmp_path, ids):
    with pytest.raises(ConfigError, match=r"suppress_tokens (is|lists)"):
        defaults(tmp_path, {"suppress_tokens": ids}, {"is_encoder_decoder": True})


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
