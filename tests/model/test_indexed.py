"""Sparse attention with an indexer (DSA) is served as far as the indexer chooses every key, and no further."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.compiler.load_or_compile import _check_positions
from mllm_compile.errors import ConfigError
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.mask_probe import _Observer
from mllm_compile.model.written_attention.indexed import choosing_every_key, full_length
from tests.config.resolving import resolved
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config

TOP = 48
MAX_TOKENS = 12


@torch.no_grad()
def greedy(model, prompt):
    ids = list(prompt)
    for _ in range(MAX_TOKENS):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# glm_moe_dsa has layers without an indexer, which take what the layer ahead has chosen.
@pytest.mark.parametrize("skip_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_texts_up_to_the_keys_that_an_indexer_chooses_have_the_tokens_of_transformers(tmp_path, skip_compiled):
    config = tiny_config("glm_moe_dsa", index_topk=TOP, indexer_types=["full", "shared"] * 2)
    save_tiny_model(config, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(3)
    lengths = 1, 7, TOP - MAX_TOKENS
    prompts = [torch.randint(0, FIRST_SPECIAL_TOKEN, (length,), generator=generator).tolist() for length in lengths]
    with Engine(config_of(tmp_path, skip_compiled, max_model_len="auto", skip_compiled=skip_compiled)) as engine:
        asked = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        found = engine.generate(prompts, asked)
    assert [list(output.token_ids) for output in found] == [greedy(model, prompt) for prompt in prompts]


def config_of(folder, expanded, **runtime):
    sections = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "compile": {"backend": "eager", "disable_passes": ["absorb_latents"] if expanded else []},
        "runtime": {"device": "cpu", "page_size": 4} | runtime,
        "cache": {"dir": str(folder / "cache")},
    }
    return EngineConfig.from_dict(sections)


def test_longer_texts_are_refused():
    said = {"max_position_embeddings": 4096, "index_topk": TOP}
    assert resolved(config_json=said).runtime.max_model_len == TOP
    for kind in ("indexed_attention", "deepseek_sparse_attention"):  # as two versions of Transformers name it
        assert resolved(config_json=said | {"layer_types": [kind]}).runtime.max_model_len == TOP
    with pytest.raises(
        ConfigError, match=rf"max_model_len is 64, but .* at most {TOP} tokens, or is sparse .* to {TOP}"
    ):
        resolved(config_json=said, runtime={"max_model_len": 64})
    of_other_layers = said | {"layer_types": ["full_attention"]}
    assert resolved(config_json=of_other_layers).runtime.max_model_len == 4096


def test_longer_texts_are_refused_where_the_number_of_keys_is_a_default_of_the_class():
    hf_model = build_config_on_meta(tiny_config("glm_moe_dsa", index_topk=TOP), torch.float32)
    sizes = hf_model.sizes()
    assert (sizes.context_len, sizes.is_sparse_beyond) == (TOP, True)
    _check_positions(SimpleNamespace(sizes=sizes), resolved(runtime={"max_model_len": TOP}))
    with pytest.raises(
        ConfigError, match=rf"max_model_len is 64, but the model is served up to {TOP} tokens: .* chosen keys"
    ):
        _check_positions(SimpleNamespace(sizes=sizes), resolved(runtime={"max_model_len": 64}))


class Blocks(torch.nn.Module):
    """Chooses blocks of keys."""

    index_topk = 4

    def forward(self, hidden_states, position_embeddings, past_key_values, position_ids):
        return hidden_states


def test_indexers_of_another_kind_are_left_alone():
    model = torch.nn.Module()
    model.indexer, before = Blocks(), Blocks.forward
    assert full_length(model) is None
    with choosing_every_key(model):
        assert "forward" not in vars(model.indexer) and type(model.indexer).forward is before


@pytest.mark.parametrize(
    ("chosen", "is_altered"), [([[[0, 1], [1, 0]]], False), ([[[0, 0], [1, 0]]], True), ([[[0], [1]]], True)]
)
def test_the_probe_sees_whether_every_key_is_chosen(chosen, is_altered):
    observer = _Observer("cpu")
    q = torch.zeros(1, 3, 2, 8)
    observer.attend(SimpleNamespace(), q, q, q, None, indices=torch.tensor(chosen))
    assert observer.calls[0].is_altered is is_altered
