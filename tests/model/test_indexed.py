"""Sparse attention with an indexer (DSA): a plain one as far as the indexer chooses every key; beyond, chosen keys."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.compiler.load_or_compile import _check_positions
from mllm_compile.errors import ConfigError, UnsupportedModelError
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.mask_probe import _Observer
from mllm_compile.model.written_attention.chosen import attend_to_chosen_keys
from mllm_compile.model.written_attention.indexed import choice_of, choosing_every_key
from mllm_compile.runtime.attention.index import chosen_keys
from mllm_compile.runtime.attention.layer import KeyChoice
from tests.config.resolving import H200, resolved
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


def test_longer_texts_are_served_where_they_are_asked_for_and_refused_beside_what_has_no_choice():
    said = {"max_position_embeddings": 4096, "index_topk": TOP}
    assert resolved(config_json=said).runtime.max_model_len == TOP
    for kind in ("indexed_attention", "deepseek_sparse_attention"):  # as two versions of Transformers name it
        assert resolved(config_json=said | {"layer_types": [kind]}).runtime.max_model_len == TOP
    of_blocks: list[dict[str, Any]] = [
        {"index_topk_blocks": TOP // 4, "index_block_size": 4},
        {"sparse_attention_config": {"sparse_topk_blocks": TOP // 4, "sparse_block_size": 4}},
    ]
    for blocks in of_blocks:
        kinds = {"max_position_embeddings": 4096, "layer_types": ["minimax_m3_sparse"]}
        assert resolved(config_json=kinds | blocks).runtime.max_model_len == TOP
    of_means = {"max_position_embeddings": 4096, "layer_types": ["indexed_attention"], "indexer_budget": TOP}
    assert resolved(config_json=of_means).runtime.max_model_len == TOP
    with pytest.raises(ConfigError, match=rf"beyond {TOP} tokens .* by means of blocks .*max_model_len: {TOP}, or"):
        resolved(config_json=of_means, runtime={"max_model_len": 64})
    longer = {"max_model_len": 64}
    assert resolved(config_json=said, runtime=longer).runtime.max_model_len == 64
    beyond = rf"max_model_len is 64, and beyond {TOP} tokens an indexer chooses keys, which .*max_model_len: {TOP}"
    refused: list[dict[str, Any]] = [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"skip_compiled": True},
    ]
    for also in refused:
        with pytest.raises(ConfigError, match=beyond):
            resolved(config_json=said, runtime=longer | also)
    with pytest.raises(ConfigError, match=r"kernels of runtime\.attention_backend flashinfer do not\. Set it to torch"):
        resolved(H200, said, runtime=longer)
    assert resolved(H200, said, runtime=longer | {"attention_backend": "torch"}).runtime.max_model_len == 64
    with pytest.raises(ConfigError, match=r"max_model_len is 5000, but the model was made for at most 4096 tokens"):
        resolved(config_json=said, runtime={"max_model_len": 5000})
    of_other_layers = said | {"layer_types": ["full_attention"]}
    assert resolved(config_json=of_other_layers).runtime.max_model_len == 4096


def test_longer_texts_are_refused_where_the_number_of_keys_is_a_default_of_the_class():
    hf_model = build_config_on_meta(tiny_config("glm_moe_dsa", index_topk=TOP), torch.float32)
    chosen = replace(hf_model, chooses_keys=True).sizes()
    assert (chosen.context_len, chosen.is_sparse_beyond) == (256, False)
    sizes = hf_model.sizes()
    assert (sizes.context_len, sizes.is_sparse_beyond) == (TOP, True)
    _check_positions(SimpleNamespace(sizes=sizes), resolved(runtime={"max_model_len": TOP}))
    with pytest.raises(
        ConfigError, match=rf"max_model_len is 64, but the model is served up to {TOP} tokens: .* chosen keys"
    ):
        _check_positions(SimpleNamespace(sizes=sizes), resolved(runtime={"max_model_len": 64}))


@pytest.mark.parametrize("form", [lambda scores: scores.sigmoid(), lambda scores: scores.relu().relu() + scores])
def test_scores_of_another_form_are_refused(form):
    class Chooser(torch.nn.Module):
        def forward(self, q, k, w):
            scores = form(torch.matmul(q, k.transpose(-1, -2).unsqueeze(1)))
            best = torch.matmul(w.unsqueeze(-2), scores).squeeze(-2).topk(1, dim=-1)[1]
            return torch.ops.mllm.attention(q[0], q[0], q[0], None, 1.0, 0.0, -1, "", None, 0, 0, None, None, [best])

    gm = torch.fx.symbolic_trace(Chooser())
    with pytest.raises(UnsupportedModelError, match=r"relu\(q · k\), nor q · k of blocks: .*max_model_len"):
        attend_to_chosen_keys(gm, KeyChoice(4))


def test_a_choice_is_the_best_of_what_a_token_sees():
    generator = torch.Generator().manual_seed(0)
    q, w = torch.randn(6, 3, 8, generator=generator), torch.randn(6, 3, generator=generator)
    keys, visible = torch.randn(6, 8, generator=generator), torch.ones(6, 6).tril().bool()
    scores = torch.einsum("thk,th->tk", torch.einsum("thd,kd->thk", q, keys).relu(), w)
    chosen = chosen_keys((q, w), keys, visible, KeyChoice(2))[:, 0]
    for token in range(6):
        best = scores[token, : token + 1].topk(min(2, token + 1)).indices.tolist()
        assert set(chosen[token].nonzero().flatten().tolist()) == set(best)
    of_each = chosen_keys((q, w), keys.expand(6, -1, -1), visible, KeyChoice(2))
    assert torch.equal(of_each[:, 0], chosen)
    assert torch.equal(chosen_keys((q, w), keys, visible, KeyChoice(6))[:, 0], visible)


def test_a_choice_of_blocks_is_the_last_ones_and_the_best_of_those_that_a_token_sees():
    generator = torch.Generator().manual_seed(0)
    q, keys = torch.randn(11, 2, 8, generator=generator), torch.randn(11, 8, generator=generator)
    visible = torch.ones(11, 11).tril().bool()
    choice = KeyChoice(top_k=2, block=3, local=1)
    chosen = chosen_keys((q,), keys, visible, choice)
    for token in range(11):
        own = token // 3
        for head in range(2):
            products = (keys[: token + 1] @ q[token, head]).split(3)
            best = max(range(own), key=[one.max().item() for one in products].__getitem__, default=own)
            expected = {key for key in range(token + 1) if key // 3 in (own, best)}
            assert set(chosen[token, head].nonzero().flatten().tolist()) == expected
    of_each = chosen_keys((q,), keys.expand(11, -1, -1), visible, choice)
    assert torch.equal(of_each, chosen)
    short = chosen_keys((q[:6],), keys[:6], visible[:6, :6], choice)
    assert torch.equal(short[:, 0], visible[:6, :6])


class Blocks(torch.nn.Module):
    """Chooses blocks of keys."""

    index_topk = 4

    def forward(self, hidden_states, position_embeddings, past_key_values, position_ids):
        return hidden_states


def test_indexers_of_another_kind_are_left_alone():
    model = torch.nn.Module()
    model.indexer, before = Blocks(), Blocks.forward
    assert choice_of(model) is None
    with choosing_every_key(model):
        assert "forward" not in vars(model.indexer) and type(model.indexer).forward is before


@pytest.mark.parametrize(("blocks", "is_altered"), [([[[[0], [0]]]], False), ([[[[0], [-1]]]], True)])
def test_the_probe_sees_whether_every_block_is_chosen(blocks, is_altered):
    observer, q = _Observer("cpu"), torch.zeros(1, 3, 2, 8)
    attention = SimpleNamespace(indexer=SimpleNamespace(block_size=4))
    observer.attend(attention, q, q, q, None, block_indices=torch.tensor(blocks))
    assert observer.calls[0].is_altered is is_altered


@pytest.mark.parametrize(
    ("chosen", "is_altered"), [([[[0, 1], [1, 0]]], False), ([[[0, 0], [1, 0]]], True), ([[[0], [1]]], True)]
)
def test_the_probe_sees_whether_every_key_is_chosen(chosen, is_altered):
    observer = _Observer("cpu")
    q = torch.zeros(1, 3, 2, 8)
    observer.attend(SimpleNamespace(), q, q, q, None, indices=torch.tensor(chosen))
    assert observer.calls[0].is_altered is is_altered
