"""lora_chains.py: between linears of few tokens adapters have one kernel, and the numbers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from mllm_compile.passes.add_lora import SLOTS_INPUT
from mllm_compile.passes.base import VARIANTS
from mllm_compile.passes.launch_lora import LaunchLora
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import LINEAR, is_call
from mllm_compile.passes.stream_linears import StreamLinears
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.lora import shapes
from tests.passes.support import stand_ins
from tests.passes.support.piece_block import NORM_FORMS, decoder_piece, fused_ops, graph_of_one_piece

TOKENS, SLOTS, RANK = 4, 3, 8
CHAINED = [
    *("stream_linear", "lora_shrink", "lora_expand_norm"),
    *("stream_linear", "lora_expand_gated_chained"),
    *("stream_linear", "lora_expand_norm"),
    *("stream_linear", "lora_expand"),
]


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu() -> Iterator[None]:
    with (
        stand_ins.streamed_ops_on_cpu(),
        stand_ins.stand_in_ops(stand_ins.LORA | stand_ins.SILU_MUL),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(nodes, "KERNEL_DTYPES", (torch.bfloat16,))
        patch.setattr(shapes, "_CHAINED_COLUMNS", 64)
        yield


def piece_with_adapters(norm: Any = NORM_FORMS[0], without: int | None = None) -> tuple[fx.GraphModule, list[Any]]:
    """A layer's linears, each with adapters but for one."""
    piece, inputs = decoder_piece(TOKENS, norm=norm)
    graph, generator = piece.graph, torch.Generator().manual_seed(1)
    first_call = next(node for node in graph.nodes if node.op != "placeholder")

    def placeholder(name: str, value: torch.Tensor) -> fx.Node:
        with graph.inserting_before(first_call):
            node = graph.placeholder(name)
        node.meta["val"] = value
        inputs.append(value)
        return node

    slots = placeholder("slots", torch.tensor([1, -1, 0, 1], dtype=torch.int32))
    for index, linear in enumerate([node for node in graph.nodes if is_call(node, LINEAR)]):
        if index == without:
            continue
        outputs, columns = linear.args[1].meta["val"].shape
        parts = [outputs // 2] * 2 if outputs > 256 else [outputs]
        a = torch.randn((SLOTS, RANK * len(parts), columns), generator=generator) / columns**0.5
        b = torch.randn((SLOTS, outputs, RANK), generator=generator) / 4
        factors = placeholder(f"a_{index}", a.bfloat16()), placeholder(f"b_{index}", b.bfloat16())
        starts = [part * parts[0] for part in range(len(parts))]
        with graph.inserting_after(linear):
            added = graph.call_function(op("add_lora"), (linear, linear.args[0], *factors, slots, starts, parts))
        added.meta.update(linear.meta)
        linear.replace_all_uses_with(added, delete_user_cb=lambda user, added=added: user is not added)
    piece.recompile()
    return piece, inputs


def variant_of(piece: fx.GraphModule, has_slots: bool = True) -> fx.GraphModule:
    gm = graph_of_one_piece(piece)
    for node in gm.graph.find_nodes(op="placeholder"):
        if has_slots and node.name == "slots":
            node.meta["input_name"] = SLOTS_INPUT
    for one in (StreamLinears(), LaunchLora()):
        gm = one(gm).gm
    (name,) = gm.meta[VARIANTS]["piece_a"].values()
    variant = gm.get_submodule(name)
    assert isinstance(variant, fx.GraphModule)
    variant.graph.lint()
    assert LaunchLora()(gm).matches == 0
    return variant


@pytest.mark.parametrize("norm", NORM_FORMS)
def test_a_layer_with_adapters_has_five_kernels_besides_its_linears_and_the_same_numbers(norm):
    piece, inputs = piece_with_adapters(norm)
    before = piece(*inputs)
    variant = variant_of(piece)
    assert fused_ops(variant) == CHAINED
    for ours, theirs in zip(variant(*inputs), before, strict=True):
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 1.2e-2
    for node in variant.graph.nodes:
        if node.op == "call_function" and "getitem" in str(node.target):
            assert isinstance(node.meta["val"], torch.Tensor)


@pytest.mark.parametrize("without", range(4), ids=["o", "gate_up", "down", "qkv"])
def test_a_linear_without_adapters_ends_a_chain(without):
    piece, inputs = piece_with_adapters(without=without)
    before = piece(*inputs)
    variant = variant_of(piece)
    assert sum(name.startswith("lora_expand") for name in fused_ops(variant)) == 3
    for ours, theirs in zip(variant(*inputs), before, strict=True):
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 1.2e-2


def test_slots_that_a_kernel_makes_are_not_read_ahead_of_it():
    variant = variant_of(piece_with_adapters()[0], has_slots=False)
    assert not {"lora_expand_norm", "lora_expand_gated_chained"} & set(fused_ops(variant))
    assert [node.args[4] for node in variant.graph.nodes if nodes.is_op(node, "lora_shrink")] == [False] * 4
