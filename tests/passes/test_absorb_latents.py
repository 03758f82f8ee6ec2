"""absorb_latents: latent attention attends over what is cached, whichever way its keys and values are written."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch

from mllm_compile.passes.absorb_latents import AbsorbLatents
from mllm_compile.passes.base import ATTENTION_LAYERS, PassTarget
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.pipeline import passes_left_out
from tests.passes.support.graph_builder import GraphBuilder, apply, run, text
from tests.passes.support.latent_layer import HEADS, RANK, ROPE, latent_layer


def model(*hows: str, **said) -> torch.fx.GraphModule:
    builder = GraphBuilder()
    x = builder.embed()
    for index, how in enumerate(hows):
        x = latent_layer(builder, x, index, how, **said)
    return builder.canonical(builder.head(x))


def attentions(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if "mllm.attention" in str(node.target)]


@pytest.mark.parametrize("how", ["scatter", "cat", "without rotation"])
def test_all_heads_share_one_kv_head_of_latents_and_the_numbers_stay(how):
    gm = model(how, how)
    before = run(gm)
    assert AbsorbLatents()(gm).matches == 2
    gm.recompile()
    torch.testing.assert_close(run(gm), before, rtol=1e-5, atol=1e-5)
    for node in attentions(gm):
        q, k, v = node.args[:3]
        assert q.meta["val"].shape[1:] == (HEADS, RANK + ROPE)
        assert k.meta["val"].shape[1:] == (1, RANK + ROPE)
        assert v is k and node.args[4] == 0.3 and node.args[10] == RANK
        assert "layers." in str(node.meta["nn_module_stack"])
    assert AbsorbLatents()(gm).matches == 0


def test_the_layer_caches_its_latents_alone():
    gm = apply(LowerAttention(), apply(AbsorbLatents(), model("cat")))
    (layer,) = gm.meta[ATTENTION_LAYERS]
    assert layer.is_latent
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim) == (HEADS, 1, RANK + ROPE, RANK)
    assert layer.cache_shape == (1, RANK + ROPE, 0)
    assert replace(layer, is_latent=False).cache_shape == (1, RANK + ROPE, RANK)


@pytest.mark.parametrize(
    "said",
    [{"window_left": 3}, {"logits_soft_cap": 9.0}, {"bias": True}, {"how": "rotated first"}],
    ids=["window", "soft cap", "bias", "another order"],
)
def test_what_it_does_not_know_is_left_alone_in_every_layer(said):
    builder = GraphBuilder()
    x = latent_layer(builder, builder.embed(), 0)
    x = latent_layer(builder, x, 1, **said)
    gm = builder.canonical(builder.head(x))
    before = text(gm)
    assert AbsorbLatents()(gm).matches == 0
    assert text(gm) == before


def test_a_model_with_plain_attention_beside_it_keeps_both():
    builder = GraphBuilder()
    gm = builder.canonical(builder.head(builder.layer(latent_layer(builder, builder.embed(), 0), 1)))
    before = text(gm)
    assert AbsorbLatents()(gm).matches == 0
    assert text(gm) == before


def test_numbers_that_another_head_has_are_no_keys_of_this_one():
    """Keys that are the linear's columns in another order are moves too."""
    builder = GraphBuilder()
    x = latent_layer(builder, builder.embed(), 0, "cat")
    gm = builder.canonical(builder.head(x))
    (node,) = attentions(gm)
    k = node.args[1]
    with gm.graph.inserting_before(node):
        flipped = gm.graph.call_function(torch.cat, ([k, k], 1))
        flipped.meta["val"] = torch.cat([k.meta["val"]] * 2, 1)
        parts = gm.graph.call_function(torch.split, (flipped, [1, HEADS, HEADS - 1], 1))
        parts.meta["val"] = torch.split(flipped.meta["val"], [1, HEADS, HEADS - 1], 1)
        other = gm.graph.call_function(operator.getitem, (parts, 1))
        other.meta["val"] = parts.meta["val"][1]
    node.update_arg(1, other)  # head h has the keys of head h + 1
    assert AbsorbLatents()(gm).matches == 0


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"compiles_pieces": False}, "compile.backend: eager"),
        ({"split_decode": False}, "(split_decode), which do not serve"),
        ({"dtype": "float32", "kv_cache_dtype": "float32"}, "not in float32 over a float32 KV cache"),
        ({"kv_cache_dtype": "float8_e4m3fn"}, "over a float8_e4m3fn KV cache"),
    ],
)
def test_it_is_left_out_where_no_kernel_attends_over_latents(said, reason):
    target = PassTarget("cuda", True, True, True, "bfloat16", "bfloat16", attention_backend="flashinfer")
    assert "absorb_latents" not in passes_left_out(target)
    assert reason in passes_left_out(replace(target, **said))["absorb_latents"]
    on_cpu = PassTarget("cpu", False, False, False, "float32", "float32")
    assert "absorb_latents" not in passes_left_out(on_cpu)
