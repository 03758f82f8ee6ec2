"""scale_keys_and_values: which weights carry the scales of a KV cache, and that the numbers behind attention stay."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx

from mllm_compile.passes.base import (
    CACHE_DTYPE,
    CACHE_SCALES,
    WEIGHT_FACTORS,
    WEIGHT_SCHEMES,
    CacheScales,
    WeightFactor,
    WeightSchemes,
)
from mllm_compile.passes.scale_keys_and_values import ScaleKeysAndValues
from mllm_compile.runtime.quantised.scheme import MXFP4, WeightScheme
from tests.passes.support import graph_builder
from tests.passes.support.graph_builder import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, GraphBuilder, run

BOTH = CacheScales("attn.k_scale", "attn.v_scale")
K_SCALE, V_SCALE = BOTH.keys, BOTH.values


class Layer(GraphBuilder):
    """Attention with norms, rotation and biases; each may be left out or replaced."""

    def normed(self, x: fx.Node, name: str, heads: int, one_more: bool = False) -> fx.Node:
        x = self.method("view", x, self.size_inputs["T"], heads, HEAD_DIM)
        inverse = self.call(
            torch.rsqrt, self.call(operator.add, self.call(torch.mean, self.call(operator.pow, x, 2), -1, True), 1e-6)
        )
        weight = self.weight(f"{name}.weight", HEAD_DIM)
        weight = self.call(operator.add, weight, 1.0) if one_more else weight
        return self.call(operator.mul, weight, self.call(operator.mul, x, inverse))

    def rotated(self, x: fx.Node) -> fx.Node:
        angles = self.method("to", self.positions, torch.float32)
        cos = self.call(torch.unsqueeze, self.call(torch.unsqueeze, self.method("cos", angles), -1), -1)
        half = HEAD_DIM // 2
        first, second = (self.call(operator.getitem, x, (..., part)) for part in (slice(None, half), slice(half, None)))
        turned = self.call(torch.cat, [self.call(operator.neg, second), first], -1)
        return self.call(operator.add, self.call(operator.mul, x, cos), self.call(operator.mul, turned, cos))

    def whole(self, norms: bool = True, one_more: bool = False, bias: bool = False) -> fx.GraphModule:
        x = self.embed()
        q = self.linear(x, "attn.q_proj", HIDDEN, bias)
        k, v = (self.linear(x, f"attn.{part}_proj", KV_HEADS * HEAD_DIM, bias) for part in "kv")
        if norms:
            q, k = self.normed(q, "attn.q_norm", HEADS, one_more), self.normed(k, "attn.k_norm", KV_HEADS, one_more)
        else:
            q, k = (
                self.method("view", one, self.size_inputs["T"], heads, HEAD_DIM)
                for one, heads in ((q, HEADS), (k, KV_HEADS))
            )
        q, k = (self.call(torch.flatten, self.rotated(one), 1) for one in (q, k))
        out = self.linear(self.attention(q, k, v), "attn.o_proj", HIDDEN, bias)
        return self.canonical(self.head(self.call(operator.add, x, out)))


def factors(
    gm: fx.GraphModule, scales: CacheScales = BOTH, cache: torch.dtype = torch.float8_e4m3fn
) -> dict[str, WeightFactor]:
    names = [node.meta["weight_name"] for node in gm.graph.nodes if "weight_name" in node.meta]
    gm.meta[CACHE_DTYPE] = cache
    gm.meta[CACHE_SCALES] = {name: scales for name in names if name.startswith("attn")}
    result = ScaleKeysAndValues()(gm)
    found = gm.meta[WEIGHT_FACTORS]
    assert result.matches == len(found)
    assert ScaleKeysAndValues()(gm).matches == 0
    return found


def expected(keys: str, queries: str, *kinds: str) -> dict[str, WeightFactor]:
    found = {}
    for kind in kinds:
        found |= {
            f"attn.{keys}.{kind}": WeightFactor(K_SCALE, True),
            f"attn.{queries}.{kind}": WeightFactor(K_SCALE, False),
        }
        found[f"attn.v_proj.{kind}"] = WeightFactor(V_SCALE, True)
    return found | {"attn.o_proj.weight": WeightFactor(V_SCALE, False)}


@pytest.mark.parametrize("bias", [False, True])
def test_where_there_are_no_norms_the_projections_carry_them(bias):
    kinds = ("weight", "bias") if bias else ("weight",)
    assert factors(Layer().whole(norms=False, bias=bias)) == expected("k_proj", "q_proj", *kinds)


def test_norms_weights_carry_the_scales_of_keys():
    found = factors(Layer().whole())
    values = expected("k_proj", "q_proj", "weight")
    assert found == {name: one for name, one in values.items() if one.scale == V_SCALE} | {
        "attn.k_norm.weight": WeightFactor(K_SCALE, True),
        "attn.q_norm.weight": WeightFactor(K_SCALE, False),
    }


@pytest.mark.parametrize("norms", [False, True])
def test_no_number_behind_attention_changes(norms, monkeypatch):
    gm = Layer().whole(norms=norms, bias=True)
    plain, powers = run(gm), {K_SCALE: 0.125, V_SCALE: 4.0}
    found, weight_values = factors(gm), graph_builder.weight_values

    def scaled(name, shape, dtype=torch.float32):
        factor = found.get(name)
        power = 1.0 if factor is None else powers[factor.scale]
        return weight_values(name, shape, dtype) * (1 / power if factor and factor.is_divided else power)

    monkeypatch.setattr(graph_builder, "weight_values", scaled)
    assert torch.equal(run(gm), plain)
    # A further factor on keys alone would show.
    powers[K_SCALE] = 1.0
    found = {name: one for name, one in found.items() if name != "attn.o_proj.weight"}
    assert not torch.equal(run(gm), plain)


def test_a_norm_of_one_plus_its_weight_leaves_the_scales_of_keys_out():
    assert {one.scale for one in factors(Layer().whole(one_more=True)).values()} == {V_SCALE}


def test_a_missing_scale_gives_no_factor():
    found = factors(Layer().whole(), replace(BOTH, keys=None))
    assert {one.scale for one in found.values()} == {V_SCALE}


def test_what_something_else_reads_is_left_alone():
    builder = Layer()
    x = builder.embed()
    q = builder.linear(x, "attn.q_proj", HIDDEN)
    k, v = (builder.linear(x, f"attn.{part}_proj", KV_HEADS * HEAD_DIM) for part in "kv")
    attended = builder.attention(q, k, v)
    gated = builder.call(operator.mul, attended, builder.call(torch.sigmoid, q))  # reads q, not what is scaled
    out = builder.linear(gated, "attn.o_proj", HIDDEN)
    found = factors(builder.canonical(builder.head(out)))
    assert set(found) == {"attn.v_proj.weight", "attn.o_proj.weight"}


def test_a_norm_behind_attention_leaves_the_scales_of_values_out():
    builder = Layer()
    x = builder.embed()
    q = builder.linear(x, "attn.q_proj", HIDDEN)
    k, v = (builder.linear(x, f"attn.{part}_proj", KV_HEADS * HEAD_DIM) for part in "kv")
    normed = builder.normed(builder.attention(q, k, v), "attn.norm", HEADS)
    out = builder.linear(builder.call(torch.flatten, normed, 1), "attn.o_proj", HIDDEN)
    found = factors(builder.canonical(builder.head(out)))
    assert set(found) == {"attn.q_proj.weight", "attn.k_proj.weight"}


def test_weights_of_scales_in_bytes_cannot_carry_any():
    gm = Layer().whole(norms=False)
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes(
        {"attn.k_proj.weight": MXFP4, "attn.v_proj.weight": WeightScheme("int4", 8, torch.bfloat16)}
    )
    assert {one.scale for one in factors(gm).values()} == {V_SCALE}


def test_a_cache_of_the_models_own_type_does_without():
    assert factors(Layer().whole(), cache=torch.bfloat16) == {}
