"""launch_lora: kernels take the place of what adapters add, in pieces and in their variants."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.functional import silu

from mllm_compile.passes.add_lora import AddLora
from mllm_compile.passes.base import ANY_ROWS, LORA, VARIANTS, LoraWish
from mllm_compile.passes.deduplicate_pieces import DeduplicatePieces
from mllm_compile.passes.fuse_silu_mul import FuseSiluMul
from mllm_compile.passes.gather_rows_early import GatherRowsEarly
from mllm_compile.passes.launch_lora import LaunchLora
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.match import nodes
from mllm_compile.passes.pack_projections import PackProjections
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.passes.variants import add_variants, copy_of
from tests.passes.support import graph_builder, stand_ins
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, apply, assert_values_hold, model_of_layers, run

OF_LAYERS = [f"layers.{layer}.attn.{name}.weight" for layer in range(2) for name in "qo"]
WEIGHTS = ["embed.weight", *OF_LAYERS]
OPS = (
    "add_lora",
    "add_lora_of_ids",
    "scale_of_adapters",
    "lora_shrink",
    "lora_expand",
    "lora_expand_gated",
    "lora_linear",
)
CHAINED = "lora_expand_norm", "lora_expand_gated_chained"


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu() -> Iterator[None]:
    with stand_ins.stand_in_ops(stand_ins.LORA | stand_ins.SILU_MUL), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "KERNEL_DTYPES", (torch.float32,))
        yield


def pieces(has_scales: bool = False) -> fx.GraphModule:
    builder, logits = model_of_layers(2)
    gm = builder.canonical(logits)
    gm.meta[LORA] = LoraWish(frozenset(WEIGHTS), num_slots=2, max_rank=4, has_scales=has_scales)
    for one in (PackProjections(), AddLora(), LowerAttention(), GatherRowsEarly(), SplitAtAttention()):
        gm = apply(one, gm)
    return apply(DeduplicatePieces(), gm)


def calls(gm: fx.GraphModule, name: str) -> list[str]:
    piece = gm.get_submodule(name)
    assert isinstance(piece, fx.GraphModule)
    found = (node.target for node in piece.graph.nodes if nodes.is_op(node, *OPS, *CHAINED))
    return [str(target).split(".")[1] for target in found]


def apart(found: Iterable[str]) -> list[str]:
    """The calls that few tokens have in the place of these."""
    of_few = {"lora_linear": ["lora_shrink", "lora_expand"]}
    return [name for one in found for name in of_few.get(one, [one])]


@pytest.mark.parametrize("has_scales", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_the_kernels_have_the_numbers_of_the_op(tokens, has_scales):
    gm = pieces(has_scales)
    before = run(gm, tokens)
    after = apply(LaunchLora(), gm)
    assert_values_hold(after)
    assert torch.allclose(run(after, tokens), before, atol=1e-5)
    for name in nodes.called_pieces(after):
        small = after.meta[VARIANTS].get(name, {})
        assert set(small) == ({64} if calls(after, name) else set())
        assert all(calls(after, variant) == apart(calls(after, name)) for variant in small.values())
        assert not {"add_lora", "add_lora_of_ids", "scale_of_adapters"} & set(calls(after, name))
    assert LaunchLora()(after).matches == 0


def test_only_slots_that_are_the_programs_input_are_read_early(monkeypatch):
    """The head has rows of slots, which a kernel gathers."""
    monkeypatch.setattr(graph_builder, "VOCAB", 16)
    monkeypatch.setitem(globals(), "WEIGHTS", [*OF_LAYERS, "head.weight"])
    gm = apply(LaunchLora(), pieces())
    found = set()
    for node in nodes_of(gm, (form for forms in gm.meta[VARIANTS].values() for form in forms.values())):
        if nodes.is_op(node, "lora_shrink"):
            found.add((node.args[2].op == "placeholder", node.args[4]))
    assert found == {(True, True), (False, False)}


def test_a_variant_that_is_there_is_kept():
    gm = pieces()
    add_variants(gm, 256, "_streamed", copy_of)
    apply(LaunchLora(), gm)
    assert {size for sizes in gm.meta[VARIANTS].values() for size in sizes} == {256}
    names = [name for sizes in gm.meta[VARIANTS].values() for name in sizes.values()]
    assert sum(calls(gm, name).count("lora_shrink") for name in names) == 4, "qkv and o of two layers"


FFN = 256
NAMES = ("q", "o", "gate", "up", "down")


def whole_layer(weights: Iterable[str], reads_twice: bool = False) -> fx.GraphModule:
    """The pieces of a layer with attention and a feed-forward, before LaunchLora."""
    builder = GraphBuilder()
    x = builder.layer(builder.embed(), 0)
    gate, up = (builder.linear(x, f"layers.0.mlp.{name}", FFN) for name in ("gate", "up"))
    product = builder.call(operator.mul, builder.call(silu, gate), up)
    if reads_twice:
        product = builder.call(torch.add, product, up)
    x = builder.call(torch.add, x, builder.linear(product, "layers.0.mlp.down", HIDDEN))
    gm = builder.canonical(builder.head(x))
    of_layer = (f"layers.0.{'attn' if name in 'qkvo' else 'mlp'}.{name}.weight" for name in weights)
    gm.meta[LORA] = LoraWish(frozenset(of_layer), num_slots=2, max_rank=4)
    for one in (PackProjections(), AddLora(), LowerAttention(), GatherRowsEarly(), SplitAtAttention()):
        gm = apply(one, gm)
    return apply(DeduplicatePieces(), gm)


@pytest.mark.parametrize("passes", [(), (FuseSiluMul,)], ids=["inductor's activation", "ours"])
@pytest.mark.parametrize("weights", [NAMES, ("gate", "down"), ("up",)], ids=str)
def test_an_activation_is_in_the_kernel_that_adds_to_its_linear(weights, passes):
    gm = whole_layer(weights)
    before = run(gm, 7)
    for one in passes:
        gm = apply(one(), gm)
    gm = apply(LaunchLora(), gm)
    assert torch.allclose(run(gm, 7), before, atol=1e-5)
    names = nodes.called_pieces(gm)
    for forms in (names, [form for name in names for form in gm.meta[VARIANTS].get(name, {}).values()]):
        found = [call for name in forms for call in calls(gm, name)]
        assert sum(call.startswith("lora_expand_gated") for call in found) == 1
        assert not any(nodes.is_op(node, "silu_mul") or node.target is silu for node in nodes_of(gm, forms))


def test_a_layer_has_one_op_for_each_linear_and_none_for_its_activation():
    """Linears that are packed, as gate and up, are one."""
    gm = apply(LaunchLora(), whole_layer(NAMES))
    found = [call for name in nodes.called_pieces(gm) for call in calls(gm, name)]
    plain, gated = ["lora_linear"], ["lora_shrink", "lora_expand_gated"]
    assert found == plain + plain + gated + plain, "of qkv, o, gate_up and down"


@pytest.mark.parametrize(
    ("any_rows", "has_scales", "expected"),
    [(False, False, "lora_linear"), (True, False, "lora_expand"), (False, True, "lora_expand")],
    ids=["plain", "deterministic", "scaled"],
)
def test_a_product_adds_to_what_b_has_written_where_its_sums_may_have_another_order(any_rows, has_scales, expected):
    gm = pieces(has_scales)
    gm.meta[ANY_ROWS] = any_rows
    gm = apply(LaunchLora(), gm)
    found = [call for name in nodes.called_pieces(gm) for call in calls(gm, name)]
    assert set(found) & {"lora_linear", "lora_expand"} == {expected, "lora_expand"}, "the embedding's has no product"
    few = (form for forms in gm.meta[VARIANTS].values() for form in forms.values())
    assert not any("lora_linear" in calls(gm, form) for form in few)


def test_an_activation_whose_input_is_read_elsewhere_stays():
    gm = whole_layer(NAMES, reads_twice=True)
    before = run(gm, 7)
    gm = apply(LaunchLora(), gm)
    assert torch.allclose(run(gm, 7), before, atol=1e-5)
    assert "lora_expand_gated" not in [call for name in nodes.called_pieces(gm) for call in calls(gm, name)]


def nodes_of(gm: fx.GraphModule, names: Iterable[str]) -> list[fx.Node]:
    pieces: list[Any] = [gm.get_submodule(name) for name in names]
    return [node for piece in pieces for node in piece.graph.nodes]


def test_without_adapters_pieces_stay():
    builder, logits = model_of_layers(1)
    gm = builder.canonical(logits)
    for one in (LowerAttention(), SplitAtAttention(), DeduplicatePieces()):
        gm = apply(one, gm)
    assert (LaunchLora()(gm).matches, gm.meta.get(VARIANTS, {})) == (0, {})
