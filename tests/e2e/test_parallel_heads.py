"""Heads that draft in one pass (DFlash, P-EAGLE) beside a model: they draft what the published maths says, answers are
those without them, and a head that does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.compiler.target import find_target
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import CheckpointError, ConfigError, MllmError, UnsupportedModelError
from mllm_compile.runtime.step.parallel_drafter import ParallelDrafter
from tests.dflash_heads import dflash_config, dflash_draft, dflash_tensors
from tests.eagle_heads import eagle_numbers, head_config, random_tensors, save_head
from tests.sample import slow_but_a_sample
from tests.tiny_model import engine_of_pages

MOST = 4
PROMPTS = [[5, 9, 2], [1] * 30, [7, 8], list(range(21))]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, frequency_penalty=0.5)
SIZES = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
Reference = Callable[[torch.Tensor, list[int], int], list[int]]  # hidden states, tokens and a count → a draft


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(**SIZES, initializer_range=0.2, bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def plain(model, cache):
    with Engine(config_of(model, cache)) as engine:
        return [tokens_of(engine, one) for one in (GREEDY, SAMPLED, GREEDY)]


def tokens_of(engine: Engine, params: SamplingParams) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, params)]


def config_of(model: Path, cache: Path, head: Path | None = None, method: str = "dflash", **changes: Any) -> Any:
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": MOST}
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 96, "page_size": 4, "max_num_batched_tokens": 48},
        "cache": {"dir": str(cache)},
        "speculative": {} if head is None else speculative | changes,
    }
    return EngineConfig.from_dict(config)


def dflash(folder: Path, model: Path, lent: bool = False, **changes: Any) -> tuple[str, Path, list[int], Reference]:
    """A head, and what it drafts; with `lent` its files lack what published ones take of the model."""
    config = dflash_config(SIZES, **changes)
    tensors = dflash_tensors(config)
    of_model = load_file(model / "model.safetensors")
    saved = dict(tensors)
    if lent:
        for name, of in {
            "embed_tokens.weight": "model.embed_tokens.weight",
            "lm_head.weight": "lm_head.weight",
        }.items():
            tensors[name] = of_model[of]
            del saved[name]

    def reference(read: torch.Tensor, ids: list[int], count: int) -> list[int]:
        return dflash_draft(config, tensors, read[: len(ids) - 1], ids[-1], count).tolist()

    return "dflash", save_head(folder, config, saved), config["aux_hidden_state_layer_ids"], reference


def peagle(folder: Path, model: Path, **changes: Any) -> tuple[str, Path, list[int], Reference]:
    config = head_config(SIZES, speculators_model_type="peagle", mask_token_id=11, **changes)
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    tensors = random_tensors(config, seed=6)

    def reference(read: torch.Tensor, ids: list[int], count: int) -> list[int]:
        masks = [11] * (count - 1)
        read = torch.cat([read[: len(ids) - 1], tensors["mask_hidden"][0].expand(len(masks), -1)])
        logits = eagle_numbers(config, tensors, torch.tensor([*ids[1:], *masks]), read)[1]
        return logits[-count:].argmax(-1).tolist()

    return "eagle3", save_head(folder, config, tensors), config["eagle_aux_hidden_state_layer_ids"], reference


HEADS: dict[str, Callable[[Path, Path], tuple[str, Path, list[int], Reference]]] = {
    "DFlash with embeddings and head of the model": lambda folder, model: dflash(folder, model, lent=True),
    "DFlash from the newest token, of some tokens": lambda folder, model: dflash(
        folder, model, sample_from_anchor=True, block_size=MOST, draft_vocab_size=40
    ),
    "P-EAGLE": peagle,
    "P-EAGLE with norms, of some tokens": lambda folder, model: peagle(
        folder, model, fc_norm=True, norm_before_residual=True, draft_vocab_size=40
    ),
}


@pytest.mark.parametrize("kind", slow_but_a_sample(HEADS, 1))
def test_a_head_drafts_what_the_published_maths_says_and_changes_no_answer(
    kind, model, cache, plain, tmp_path, monkeypatch
):
    from transformers import AutoModelForCausalLM

    method, head, places, reference = HEADS[kind](tmp_path / "head", model)
    made, propose = [], ParallelDrafter.propose

    def noting(self, asked):
        drafts = propose(self, asked)
        for one, draft in zip(asked, drafts, strict=True):
            made.append(([*one.request.prompt_token_ids, *one.request.output_token_ids], one.most, list(draft)))
        return drafts

    with Engine(config_of(model, cache, head, method)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(ParallelDrafter, "propose", noting)
            greedy = tokens_of(engine, GREEDY)
        assert [greedy, tokens_of(engine, SAMPLED), tokens_of(engine, GREEDY)] == plain
        assert engine.stats().drafted_tokens > 0
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert {most for _, most, _ in made} == set(range(1, MOST + 1))
    with torch.no_grad():
        for ids, most, draft in made[:: len(made) // 16]:
            hidden = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
            assert draft == reference(torch.cat([hidden[place][0] for place in places], -1), ids, most)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_preempted_requests_in_chunks_have_the_same_answers(kind, model, cache, plain, tmp_path):
    method, head, *_ = HEADS[kind](tmp_path / "head", model)
    with engine_of_pages(config_of(model, cache, head, method), 24) as engine:
        assert [tokens_of(engine, one) for one in (GREEDY, SAMPLED, GREEDY)] == plain
        assert engine.stats().preemptions > 0 and engine.stats().drafted_tokens > 0


def without(name: str) -> dict[str, torch.Tensor]:
    tensors = dflash_tensors(dflash_config(SIZES))
    del tensors[name]
    return tensors


def of_layers(**changes: Any) -> dict[str, Any]:
    config = dflash_config(SIZES)
    config["transformer_layer_config"] |= changes
    return config


def of_the_usual_vocabulary() -> dict[str, Any]:
    """The config leaves out what Transformers has as default."""
    config = dflash_config(SIZES, mask_token_id=151_936)
    del config["transformer_layer_config"]["vocab_size"]
    return config


WRONG: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor] | None, type[MllmError], str]] = {
    "hidden size": (
        dflash_config(SIZES | {"hidden_size": 64}),
        None,
        ConfigError,
        "hidden states of 64 numbers, and the model's have 48",
    ),
    "vocabulary": (
        dflash_config(SIZES | {"vocab_size": 99}),
        None,
        ConfigError,
        "a vocabulary of 99 tokens, and the model 90",
    ),
    "layers": (
        dflash_config(SIZES, aux_hidden_state_layer_ids=[2, 18]),
        None,
        UnsupportedModelError,
        r"aux_hidden_state_layer_ids are \[2, 18\], and the model has 3 layers",
    ),
    "no layers": (
        dflash_config(SIZES, aux_hidden_state_layer_ids=None),
        dflash_tensors(dflash_config(SIZES)),
        CheckpointError,
        "aux_hidden_state_layer_ids is None; expected numbers of layers",
    ),
    "a short block": (
        dflash_config(SIZES, block_size=MOST),
        None,
        ConfigError,
        f"num_speculative_tokens is {MOST}, and speculative.model .* drafts {MOST - 1} tokens at most. Set it",
    ),
    "no block": (dflash_config(SIZES, block_size=1), None, CheckpointError, "block_size is 1; expected 2 or more"),
    "a mask": (dflash_config(SIZES, mask_token_id=90), None, CheckpointError, "90; expected a token from 0 to 89"),
    "a mask of the usual vocabulary": (
        of_the_usual_vocabulary(),
        dflash_tensors(dflash_config(SIZES)),
        UnsupportedModelError,
        "mask_token_id is 151936; expected a token from 0 to 151935",
    ),
    "windows": (
        of_layers(layer_types=["sliding_attention", "full_attention"], sliding_window=8, use_sliding_window=True),
        None,
        UnsupportedModelError,
        "its layers are of kind sliding_attention; expected full_attention",
    ),
    "other layers": (
        of_layers(model_type="llama"),
        None,
        UnsupportedModelError,
        "its layers are of 'llama'; expected qwen3",
    ),
    "a tensor": (dflash_config(SIZES), without("hidden_norm.weight"), CheckpointError, "lacks 'hidden_norm.weight'"),
    "a head of some tokens": (
        dflash_config(SIZES, draft_vocab_size=40),
        {
            name: tensor
            for name, tensor in dflash_tensors(dflash_config(SIZES, draft_vocab_size=40)).items()
            if name != "lm_head.weight"
        },
        CheckpointError,
        "lacks 'lm_head.weight'",
    ),
    "EAGLE-3": (
        head_config(SIZES),
        random_tensors(head_config(SIZES)),
        UnsupportedModelError,
        "a head of kind 'eagle3'",
    ),
}


@pytest.mark.parametrize("case", slow_but_a_sample(WRONG, 4))
def test_a_head_that_does_not_fit_is_refused_with_both_sides_numbers(case, model, tmp_path):
    config, tensors, error, text = WRONG[case]
    head = save_head(tmp_path / "head", config, dflash_tensors(config) if tensors is None else tensors)
    with pytest.raises(error, match=text):
        load_or_compile(config_of(model, tmp_path / "cache", head))


def test_a_head_of_another_method_is_refused_with_the_one_to_set(model, tmp_path):
    head = dflash(tmp_path / "head", model)[1]
    with pytest.raises(ConfigError, match=r"a head of kind 'dflash': set speculative.method: dflash"):
        find_target(config_of(model, tmp_path, head, "draft_model"))
    with pytest.raises(UnsupportedModelError, match=r"'dflash'.*: expected speculators_model_type: eagle3 or peagle"):
        find_target(config_of(model, tmp_path, head, "eagle3"))


def test_the_model_that_lends_embeddings_is_a_part_of_the_key(model, tmp_path):
    """Its files are read, wherever the head's folder is."""
    lent = find_target(config_of(model, tmp_path, dflash(tmp_path / "a", model, lent=True)[1])).drafter
    whole = find_target(config_of(model, tmp_path, dflash(tmp_path / "b", model)[1])).drafter
    assert len(lent.weights.files) == 2 and len(whole.weights.files) == 1
    assert {(lent.model.path / name).resolve() for name in lent.weights.files} == {
        (tmp_path / "a" / "model.safetensors").resolve(),
        (model / "model.safetensors").resolve(),
    }
    assert lent.factors != whole.factors
