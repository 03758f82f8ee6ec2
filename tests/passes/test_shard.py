"""The cut of a model over ranks: numbers of all ranks, run in lockstep, equal the whole's; and which weights are
cut."""

from __future__ import annotations

import operator
import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import fx
from torch.nn import functional

from mllm_compile.passes.base import RANKS, WEIGHT_CUTS, WEIGHT_SCHEMES, PassTarget, WeightSchemes
from mllm_compile.passes.match.nodes import LINEAR, is_attention
from mllm_compile.passes.pipeline import passes_left_out
from mllm_compile.passes.shard import Shard, whole_weights
from mllm_compile.passes.sharding.states import is_state, operands_of
from mllm_compile.runtime.quantised.scheme import WeightScheme
from tests.model.tiny_configs import tiny_config
from tests.passes.support.graph_builder import HEAD_DIM, HEADS, HIDDEN, GraphBuilder, apply, model_of_layers, text
from tests.passes.support.lockstep import Cut, canonical_graph, cut
from tests.sample import slow_but_a_sample

LARGEST_ERROR = 1e-5  # of float32 logits
MODELS_PAGE = Path(__file__).parents[2] / "docs" / "lab" / "models.md"
# Models that pack, interleave, norm over all heads, add biases, mix experts or attend to latents: always tested.
FIXED = {"qwen3": 2, "phi3": 2, "olmo2": 4, "gpt_oss": 4, "deepseek_v3": 2}  # to the number of ranks
EACH_TIME = 1  # a further one, another with every commit


def served() -> list[str]:
    """The architectures that the page of models lists as served."""
    section = re.search(r"^## Served$(.*?)^## ", MODELS_PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert section is not None
    return re.findall(r"^\| ([\w-]+) \| [\d.]+e", section[1], re.M)


@cache
def cut_model(name: str, num_ranks: int) -> Cut:
    gm, constants = canonical_graph(tiny_config(name))
    return cut(gm, num_ranks, constants)


def num_heads(gm: fx.GraphModule) -> list[int]:
    return [node.args[0].meta["val"].shape[1] for node in gm.graph.nodes if is_attention(node)]  # type: ignore[union-attr]


# Architectures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_ranks"), FIXED.items())
def test_ranks_compute_what_one_does_and_have_a_part_of_every_layer(name, num_ranks):
    found = cut_model(name, num_ranks)
    assert found.error < LARGEST_ERROR
    assert set(num_heads(found.gm)) == {4 // num_ranks}  # and with four ranks each head of keys is held twice
    matrices = {weight for weight, size in whole_weights(found.gm).items() if size > 64 * 64 // 2}
    assert not matrices


@pytest.mark.parametrize(
    ("name", "num_ranks", "sizes"),
    [
        # Of 2 heads of keys and 4 of values, 16 wide; two ranks hold each of the former.
        ("qwen3_next", 4, {"causal_conv": 16 + 16 + 16, "gated_delta": 1}),
        # Of 8 heads, 16 wide, and one group of 2 * 8 channels, which both ranks hold.
        ("bamba", 2, {"causal_conv": 64 + 16, "ssd": 4}),
        ("mamba", 2, {"causal_conv": 48, "selective_scan": 48}),
    ],
)
def test_states_are_cut_by_heads_and_channels(name, num_ranks, sizes):
    found = cut_model(name, num_ranks)
    assert found.error < LARGEST_ERROR
    states = [node for node in found.gm.graph.nodes if is_state(node)]
    assert {(operands_of(node)[0], node.meta["val"].shape[1]) for node in states} == set(sizes.items())
    pattern = r"layers\.0\.(linear_attn|mamba|mixer)\.(dt_bias|dt_proj\.bias|A_log)"
    assert sum(re.search(pattern, key) is not None for key in found.cuts) == 2


@pytest.mark.parametrize(("name", "num_ranks"), slow_but_a_sample(product(served(), (2, 4)), EACH_TIME))
def test_every_served_architecture_computes_the_same(name, num_ranks):
    assert cut_model(name, num_ranks).error < LARGEST_ERROR


def test_weights_are_cut_as_transformers_plans_to():
    for name in ("qwen3", "mixtral"):
        config = tiny_config(name)
        found = cut_model(name, 2)
        planned = {f"model.{pattern}": kind for pattern, kind in config.base_model_tp_plan.items()}
        weights = found.gm.graph.find_nodes(op="placeholder")
        num_dims = {node.meta.get("weight_name"): node.meta["val"].dim() for node in weights}
        checked = 0
        for weight, cuts in found.cuts.items():
            module = re.sub(r"\.\d+\.", ".*.", weight.removesuffix(".weight"))
            dim = {"colwise": -2, "rowwise": -1}.get(planned.get(module, ""))
            if dim is not None:
                assert [one.dim - num_dims[weight] for one in cuts] == [dim], weight
                checked += 1
        wanted = sum(kind in ("colwise", "rowwise") for kind in planned.values())
        assert checked == wanted * config.num_hidden_layers


def test_a_sum_over_ranks_is_behind_attention_and_behind_the_feed_forward_and_nowhere_else():
    found = cut_model("qwen3", 2)
    layers = tiny_config("qwen3").num_hidden_layers
    assert found.calls == {"all_reduce": 2 * layers + 1, "all_gather": 1, "rank_index": 1}  # one for the vocabulary


def test_norms_over_all_heads_are_means_of_ranks_means():
    found = cut_model("olmo2", 4)
    layers = tiny_config("olmo2").num_hidden_layers
    assert found.calls["all_reduce"] == 4 * layers + 1


# Small graphs ---------------------------------------------------------------------------------------------------------


def feed_forward(builder: GraphBuilder, x: fx.Node, name: str, width: int, bias: bool = False) -> fx.Node:
    gate, up = (builder.linear(x, f"{name}.{part}", width, bias) for part in ("gate", "up"))
    product = builder.call(operator.mul, builder.call(functional.silu, gate), up)
    return builder.linear(product, f"{name}.down", HIDDEN, bias)


def test_columns_and_rows_are_cut_and_a_bias_is_added_once():
    builder = GraphBuilder()
    x = builder.embed()
    found = cut(
        builder.canonical(builder.head(builder.call(operator.add, x, feed_forward(builder, x, "ff", 12, True)))), 2
    )
    assert found.error < LARGEST_ERROR
    assert {name: [one.dim for one in cuts] for name, cuts in found.cuts.items()} == {
        **{f"ff.{part}.{kind}": [0] for part in ("gate", "up") for kind in ("weight", "bias")},
        "ff.down.weight": [1],
    }
    assert found.cuts["ff.down.weight"][0].ranges == (((0, 6),), ((6, 6),))
    assert found.calls["all_reduce"] == 1


def test_two_partial_sums_that_are_added_are_summed_over_ranks_once():
    builder = GraphBuilder()
    x = builder.embed()
    both = builder.call(operator.add, *(feed_forward(builder, x, name, 12) for name in "ab"))
    found = cut(builder.canonical(builder.head(builder.call(operator.add, x, both))), 2)
    assert found.error < LARGEST_ERROR
    assert found.calls["all_reduce"] == 1


@pytest.mark.parametrize(("scheme", "ranges"), [
    (WeightScheme("fp8", 6), ((0, 12), (12, 12))),
    (WeightScheme("fp8", 24), ((0, 12), (12, 12))),
    (WeightScheme("int4", 24), ((0, 12), (12, 12))),
    (WeightScheme("int4", 8), None),  # three groups
])  # fmt: skip
def test_inputs_that_share_a_scale_are_on_one_rank(scheme, ranges):
    builder = GraphBuilder()
    x = builder.embed()
    gm = builder.canonical(builder.head(builder.call(operator.add, x, feed_forward(builder, x, "ff", 24))))
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes({"ff.down.weight": scheme})
    found = cut(gm, 2)
    assert found.error < LARGEST_ERROR
    assert {name: one.ranges for name, (one,) in found.cuts.items()} == (
        {f"ff.{part}.weight": tuple((one,) for one in ranges) for part in ("gate", "up", "down")} if ranges else {}
    )


def test_weights_that_do_not_divide_are_whole_and_the_rest_is_cut():
    builder = GraphBuilder()
    x = builder.layer(builder.embed(), 0)
    found = cut(builder.canonical(builder.head(builder.call(operator.add, x, feed_forward(builder, x, "ff", 9)))), 2)
    assert found.error < LARGEST_ERROR
    assert {name.partition(".")[0] for name in found.cuts} == {"layers"}


def test_ops_without_a_rule_are_computed_by_every_rank():
    builder = GraphBuilder()
    x = builder.embed()
    gate = builder.call(torch.cumsum, builder.linear(x, "ff.gate", 12), -1)
    x = builder.call(operator.add, x, builder.linear(gate, "ff.down", HIDDEN))
    found = cut(builder.canonical(builder.head(x)), 2)
    assert (found.error, found.cuts) == (0.0, {})


def test_a_weight_that_is_read_whole_elsewhere_is_not_cut():
    builder = GraphBuilder()
    x = builder.embed()
    shared = builder.weight("shared.weight", 12, HIDDEN)
    hidden = builder.call(functional.silu, builder.call(LINEAR, x, shared, None))
    out = builder.linear(hidden, "down", HIDDEN)
    norm = builder.call(torch.mean, shared)
    x = builder.call(operator.mul, builder.call(operator.add, x, out), norm)
    found = cut(builder.canonical(builder.head(x)), 2)
    assert found.error < LARGEST_ERROR
    assert "shared.weight" not in found.cuts


def test_keys_that_are_written_part_by_part_and_share_a_part_over_heads_are_cut_by_heads():
    builder = GraphBuilder()
    x = builder.embed()
    tokens, half = builder.size_inputs["T"], HEAD_DIM // 2
    q = builder.linear(x, "q", HIDDEN)
    own = builder.method("view", builder.linear(x, "k", HEADS * half), tokens, HEADS, half)
    shared = builder.method("view", builder.linear(x, "shared", half), tokens, 1, half)
    room = builder.method("new_empty", own, tokens, HEADS, HEAD_DIM)
    scatter = torch.ops.aten.slice_scatter.default
    first = builder.call(scatter, room, own, 2, 0, half, 1)
    spread = builder.method("expand", shared, -1, HEADS, -1)
    k = builder.method("flatten", builder.call(scatter, first, spread, 2, half, None, 1), 1)
    out = builder.linear(builder.attention(q, k, builder.linear(x, "v", HIDDEN)), "o", HIDDEN)
    found = cut(builder.canonical(builder.head(builder.call(operator.add, x, out))), 2)
    assert found.error < LARGEST_ERROR
    assert set(found.cuts) == {f"{name}.weight" for name in ("q", "k", "v", "o")}
    assert num_heads(found.gm) == [HEADS // 2]
    assert "new_empty" not in text(found.gm)


def test_a_parameter_that_a_call_without_a_rule_reads_is_not_cut():
    builder = GraphBuilder()
    x = builder.embed()
    scale = builder.weight("scale", 12)
    hidden = builder.call(operator.mul, builder.linear(x, "up", 12), scale)
    x = builder.call(operator.add, x, builder.linear(hidden, "down", HIDDEN))
    other = builder.linear(builder.call(torch.cumsum, builder.linear(x, "other", 12), -1), "last", HIDDEN)
    x = builder.call(operator.add, builder.call(operator.add, x, other), builder.call(torch.std, scale))
    found = cut(builder.canonical(builder.head(x)), 2)
    assert found.error < LARGEST_ERROR
    assert "scale" not in found.cuts


def test_heads_that_do_not_divide_leave_attention_whole():
    builder, logits = model_of_layers(1)  # 4 heads, 2 of keys, a vocabulary of 11
    found = cut(builder.canonical(logits), 3)
    assert (found.error, found.cuts) == (0.0, {})


def test_a_norm_over_all_heads_is_whole_where_the_heads_do_not_divide():
    builder = GraphBuilder()
    x = builder.embed()
    q, k, v = (builder.linear(x, name, HIDDEN) for name in "qkv")
    square = builder.call(torch.mean, builder.call(operator.mul, q, q), -1, keepdim=True)
    q = builder.call(operator.mul, q, builder.call(torch.rsqrt, square))
    out = builder.linear(builder.attention(q, k, v), "o", HIDDEN)
    found = cut(builder.canonical(builder.head(builder.call(operator.add, x, out))), 3)
    assert (found.error, found.cuts) == (0.0, {})


def test_heads_go_with_their_slopes():
    builder = GraphBuilder()
    x = builder.layer(builder.embed(), 0, alibi_slopes=[0.5, 0.25, 0.125, 0.0625])
    found = cut(builder.canonical(builder.head(x)), 2)
    assert found.error < LARGEST_ERROR
    assert num_heads(found.gm) == [HEADS // 2]


def test_the_pass_does_nothing_the_second_time_nor_for_one_rank():
    builder, logits = model_of_layers(1)
    gm = builder.canonical(logits)
    before = text(gm)
    assert Shard()(gm).matches == 0
    assert text(gm) == before
    gm.meta[RANKS] = 2
    once = text(apply(Shard(), gm))
    assert once != before
    assert text(apply(Shard(), gm)) == once
    assert gm.meta[WEIGHT_CUTS]


def test_the_pass_is_there_for_several_ranks_alone():
    target = PassTarget("cpu", True, False, False, "float32", "float32")
    assert "tensor_parallel_size is 1" in passes_left_out(target)["shard"]
    several = PassTarget("cpu", True, False, False, "float32", "float32", num_ranks=2)
    assert "shard" not in passes_left_out(several)
