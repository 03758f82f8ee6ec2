"""An EAGLE-3 head beside a model: answers are those without it, one that is right drafts all of them, and a head that
does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.compiler.target import find_target
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import CheckpointError, ConfigError, MllmError, UnsupportedModelError
from mllm_compile.store.artifact import DRAFTER
from tests.e2e.test_speculation import REPEATS, answers
from tests.eagle_heads import head_config, markov_model, random_tensors, right_head, save_head
from tests.sample import slow_but_a_sample
from tests.tiny_model import TINY, engine_of_pages, tiny_config

EAGER = {"backend": "eager"}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PARAMS = (GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=24))
MODEL = json.loads((TINY / "config.json").read_text())
VARIANTS: dict[str, dict[str, Any]] = {
    "a part of the vocabulary": {"draft_vocab_size": 300, "norm_before_residual": True},
    "one norm": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [4, 0, 2]},
    "norms": {"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 3]},
}


def speculative(head: Path, most: int = 3) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": most}


def config_with(cache: Path, head: Path, **sections: Any) -> EngineConfig:
    return tiny_config(cache, **({"compile": EAGER, "speculative": speculative(head)} | sections))


def answers_of_markov(
    model: Path, cache: Path, head: Path | dict[str, Any] | None, num_pages: int = 60
) -> tuple[list[list[int]], Any]:
    """Args: head: or the section `speculative`."""
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "compile": EAGER,
        "runtime": {"device": "cpu", "max_model_len": 64, "page_size": 4, "max_num_batched_tokens": 16},
        "cache": {"dir": str(cache)},
        "speculative": speculative(head) if isinstance(head, Path) else head or {},
    }
    prompts = [[5, 9, 2], [1] * 30, [7, 8], list(range(21))]
    with engine_of_pages(EngineConfig.from_dict(config), num_pages) as engine:
        found = [output.token_ids for output in engine.generate(prompts, GREEDY)]
        return found, engine.stats()


def test_a_head_that_is_right_drafts_every_token(tmp_path):
    behind = markov_model(tmp_path / "model")
    head = right_head(tmp_path / "head", behind)
    found, stats = answers_of_markov(tmp_path / "model", tmp_path / "cache", head)
    for prompt, answer in zip([2, 1, 8, 20], found, strict=True):
        expected, token = [], prompt
        for _ in range(24):
            token = int(behind[token])
            expected.append(token)
        assert answer == expected
    assert stats.drafted_tokens == stats.accepted_tokens > 0


@pytest.mark.slow
def test_a_head_that_is_cut_is_right_about_the_tokens_that_it_has(tmp_path):
    behind = markov_model(tmp_path / "model")
    head = right_head(tmp_path / "head", behind)
    path, known = tmp_path / "tokens.json", set(range(0, 60, 2)) | {1}
    path.write_text(json.dumps(sorted(known)))
    plain, _ = answers_of_markov(tmp_path / "model", tmp_path / "cache", None)
    section = speculative(head, most=1) | {"token_map": str(path)}
    found, stats = answers_of_markov(tmp_path / "model", tmp_path / "cache", section)
    assert found == plain
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    own = right_head(tmp_path / "own", behind, draft_vocab_size=50)
    with pytest.raises(UnsupportedModelError, match="the head has 50 of 60 tokens by itself"):
        answers_of_markov(tmp_path / "model", tmp_path / "cache", speculative(own) | {"token_map": str(path)})


@pytest.mark.slow
def test_preempted_requests_of_a_right_head_in_chunks_have_the_same_answers(tmp_path):
    behind = markov_model(tmp_path / "model")
    head = right_head(tmp_path / "head", behind, draft_vocab_size=50)
    plain, _ = answers_of_markov(tmp_path / "model", tmp_path / "cache", None, 30)
    found, stats = answers_of_markov(tmp_path / "model", tmp_path / "cache", head, 30)
    assert found == plain
    assert stats.preemptions > 0
    assert 2 < stats.acceptance_length < 4


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_head_changes_no_answer(variant, eager_cache, tmp_path):
    config = head_config(MODEL, **VARIANTS[variant])
    head = save_head(tmp_path / "head", config)
    plain, _ = answers(tiny_config(eager_cache, compile=EAGER), REPEATS, *PARAMS)
    drafted, drafts = answers(config_with(eager_cache, head), REPEATS, *PARAMS)
    assert drafted == plain
    assert drafts > 0
    with Engine(load_or_compile(config_with(eager_cache, head)).folder) as engine:
        again = [output.token_ids for output in engine.generate(REPEATS, GREEDY)]
    firsts = plain[: len(REPEATS)]
    assert again == [token_ids for token_ids, *_ in firsts]


SPOILT = {
    "ids beyond the vocabulary": ("d2t", 2**40),
    "ids below it": ("d2t", -(2**40)),
    "logits that overflow": ("lm_head.weight", 3e38),
    "hidden states that overflow": ("fc.weight", 3e38),
}


@pytest.mark.parametrize("spoilt", slow_but_a_sample(SPOILT, 1))
def test_a_spoilt_head_costs_drafts_alone(spoilt, eager_cache, tmp_path):
    config = head_config(MODEL, draft_vocab_size=99)
    tensors, (name, value) = random_tensors(config), SPOILT[spoilt]
    tensors[name] = torch.full_like(tensors[name], value)
    head = save_head(tmp_path / "head", config, tensors)
    plain, _ = answers(tiny_config(eager_cache, compile=EAGER), REPEATS, *PARAMS)
    drafted, _ = answers(config_with(eager_cache, head), REPEATS, *PARAMS)
    assert drafted == plain


def with_sizes(**sizes: int) -> dict[str, Any]:
    return head_config(MODEL | sizes)


def without(name: str) -> dict[str, torch.Tensor]:
    tensors = random_tensors(head_config(MODEL))
    del tensors[name]
    return tensors


WRONG: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor] | None, type[MllmError], str]] = {
    "hidden size": (
        with_sizes(hidden_size=64),
        None,
        ConfigError,
        "hidden states of 64 numbers, and the model's have 192",
    ),
    "vocabulary": (with_sizes(vocab_size=99), None, ConfigError, "a vocabulary of 99 tokens, and the model 3072"),
    "layers": (
        head_config(MODEL, eagle_aux_hidden_state_layer_ids=[2, 18, 33]),
        None,
        UnsupportedModelError,
        r"\[2, 18, 33\], and the model has 4 layers",
    ),
    "positions": (with_sizes(max_position_embeddings=64), None, ConfigError, "made for at most 64 tokens"),
    "a tensor": (head_config(MODEL), without("fc.weight"), CheckpointError, "lacks 'fc.weight'"),
    "an unknown tensor": (
        head_config(MODEL),
        random_tensors(head_config(MODEL)) | {"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)},
        CheckpointError,
        "has no place",
    ),
    "a shape": (
        head_config(MODEL),
        random_tensors(head_config(MODEL)) | {"fc.weight": torch.zeros(192, 192)},
        CheckpointError,
        r"has shape \[192, 192\], the model's config.json says \[192, 576\]",
    ),
    "another kind": (head_config(MODEL, speculators_model_type="medusa"), None, UnsupportedModelError, "'medusa'"),
}


@pytest.mark.parametrize("case", slow_but_a_sample(WRONG, 3))
def test_a_head_that_does_not_fit_is_refused_with_both_sides_numbers(case, tmp_path):
    config, tensors, error, text = WRONG[case]
    head = save_head(tmp_path / "head", config, tensors)
    with pytest.raises(error, match=text):
        load_or_compile(config_with(tmp_path / "cache", head))


def test_heads_are_no_models_and_no_draft_models(tmp_path):
    head = save_head(tmp_path / "head", head_config(MODEL))
    with pytest.raises(UnsupportedModelError, match="is a head of kind 'eagle3', which drafts for a model"):
        find_target(tiny_config(tmp_path, model={"path": str(head), "dtype": "float32"}))
    asked = speculative(head) | {"method": "draft_model"}
    with pytest.raises(ConfigError, match=r"a head of kind 'eagle3': set speculative.method: eagle3"):
        find_target(tiny_config(tmp_path, speculative=asked))
    with pytest.raises(UnsupportedModelError, match="is a model's: expected speculators_model_type: eagle3"):
        find_target(config_with(tmp_path, TINY))
    with pytest.raises(ConfigError, match=r"runtime.skip_compiled is set, and speculative.method is eagle3"):
        find_target(config_with(tmp_path, head, runtime={"skip_compiled": True}))


def test_a_head_is_a_part_of_the_key(tmp_path):
    config = head_config(MODEL)
    keys = [
        find_target(config_with(tmp_path, save_head(tmp_path / str(place), one))).factors["draft model"]
        for place, one in enumerate((config, config | {"norm_output": True}))
    ]
    assert len(set(keys)) == 2
    assert DRAFTER in str(find_target(config_with(tmp_path, tmp_path / "0")).drafter.folder)
