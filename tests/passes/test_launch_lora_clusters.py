"""launch_lora_clusters: many tokens have one kernel for A, one between linears with adapters; numbers are the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from mllm_compile.passes.add_lora import SLOTS_INPUT
from mllm_compile.passes.base import ANY_ROWS, VARIANTS
from mllm_compile.passes.fuse_gated_linear import FuseGatedLinear
from mllm_compile.passes.launch_lora import LaunchLora
from mllm_compile.passes.launch_lora_clusters import LaunchLoraClusters
from mllm_compile.passes.match import nodes
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.lora_clusters import kernel
from mllm_compile.runtime.ops.lora_clusters.family import Family
from mllm_compile.runtime.ops.lora_clusters.kernel import NormKernel, ShrinkKernel
from tests.passes.support import stand_ins
from tests.passes.support.piece_block import NORM_FORMS, decoder_piece, fused_ops, graph_of_one_piece

TOKENS, RANK = 5, 16
JOINED = [
    *("lora_shrink_in_clusters", "lora_norm_in_clusters", "gated_linear_lora"),
    *("lora_shrink_in_clusters", "lora_norm_in_clusters", "lora_expand"),
]


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu() -> Iterator[None]:
    with (
        stand_ins.streamed_ops_on_cpu(),
        stand_ins.stand_in_ops(stand_ins.LORA | stand_ins.SILU_MUL),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(nodes, "KERNEL_DTYPES", (torch.bfloat16,))
        patch.setattr(kernel, "_GROUP_COLUMNS", 16)  # as the piece has 256 columns
        yield


def launched(piece: fx.GraphModule, has_slots: bool = True) -> fx.GraphModule:
    gm = graph_of_one_piece(piece)
    gm.meta[ANY_ROWS] = True
    for node in gm.graph.find_nodes(op="placeholder"):
        if has_slots and node.name == "adapter_slots":
            node.meta["input_name"] = SLOTS_INPUT
    for one in (FuseGatedLinear(), LaunchLora()):
        gm = one(gm).gm
    return gm


@pytest.mark.parametrize("norm", NORM_FORMS)
def test_the_norms_of_a_layer_are_one_kernel_each_with_what_adapters_add_beside_them(norm):
    piece, inputs = decoder_piece(TOKENS, norm=norm, rank=RANK)
    before = piece(*inputs)
    gm = launched(piece)
    of_few = [fused_ops(gm.get_submodule(name)) for name in gm.meta[VARIANTS]["piece_a"].values()]
    assert LaunchLoraClusters()(gm).matches == 4
    gm.piece_a.graph.lint()
    assert [name for name in fused_ops(gm.piece_a) if name != "linear"] == JOINED
    assert [fused_ops(gm.get_submodule(name)) for name in gm.meta[VARIANTS]["piece_a"].values()] == of_few
    for ours, theirs in zip(gm.piece_a(*inputs), before, strict=True):
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 1.2e-2
    for node in gm.piece_a.graph.find_nodes(op="call_function", target=op("lora_norm_in_clusters")):
        shapes = [value.shape for value in node.meta["val"]]
        assert shapes == [value.shape for value in node.target(*nodes_values(node))]
    assert LaunchLoraClusters()(gm).matches == 0
    wanted = Family().wanted([(gm.piece_a, None)])
    norms = [NormKernel(256, rows, RANK, norm == "plus one") for rows in (32, 48)]
    assert wanted == (ShrinkKernel(256, RANK), norms[0], ShrinkKernel(512, RANK), norms[1])


def nodes_values(node: fx.Node) -> tuple[object, ...]:
    return fx.map_arg(node.args, lambda one: one.meta["val"])


@pytest.mark.parametrize("why", ["a rank of no kernel", "columns of no kernel", "float16"])
def test_what_no_kernel_takes_stays(why, monkeypatch):
    if "columns" in why:
        monkeypatch.setattr(kernel, "_GROUP_COLUMNS", 512)
    if why == "float16":
        monkeypatch.setattr(nodes, "KERNEL_DTYPES", (torch.float16,))
    dtype = torch.float16 if why == "float16" else torch.bfloat16
    piece, _ = decoder_piece(TOKENS, dtype, rank=4 if "rank" in why else RANK)
    gm = launched(piece)
    before = fused_ops(gm.piece_a)
    # Of gates, ups and qkv rows of A are a multiple of 8.
    assert LaunchLoraClusters()(gm).matches == (1 if "rank" in why else 0)
    assert ("lora_norm_in_clusters" in fused_ops(gm.piece_a), before.count("lora_shrink")) == (False, 4)


def test_slots_that_a_kernel_makes_are_not_read_ahead_of_it():
    gm = launched(decoder_piece(TOKENS, rank=RANK)[0], has_slots=False)
    assert LaunchLoraClusters()(gm).matches == 4
    shrinks = gm.piece_a.graph.find_nodes(op="call_function", target=op("lora_shrink_in_clusters"))
    assert [node.args[3] for node in shrinks] == [False] * 4


def test_a_linear_without_adapters_behind_a_norm_leaves_it():
    piece, inputs = decoder_piece(TOKENS, rank=RANK)
    before = piece(*inputs)
    gm = launched(piece)
    shrinks = gm.piece_a.graph.find_nodes(op="call_function", target=op("lora_shrink"))
    last = max(shrinks, key=lambda node: list(gm.piece_a.graph.nodes).index(node))
    for reader in list(last.users):  # its linear has none
        reader.replace_all_uses_with(reader.args[0])
        gm.piece_a.graph.erase_node(reader)
    gm.piece_a.graph.erase_node(last)
    assert LaunchLoraClusters()(gm).matches == 3
    assert torch.allclose(gm.piece_a(*inputs)[0].float(), before[0].float(), atol=0.02, rtol=0.02)
