"""launch_lora: kernels take the place of what adapters add, in pieces and in their variants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from mllm_compile.passes.add_lora import AddLora
from mllm_compile.passes.base import LORA, VARIANTS, LoraWish
from mllm_compile.passes.deduplicate_pieces import DeduplicatePieces
from mllm_compile.passes.gather_rows_early import GatherRowsEarly
from mllm_compile.passes.launch_lora import LaunchLora
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.match import nodes
from mllm_compile.passes.pack_projections import PackProjections
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.passes.variants import add_variants, copy_of
from tests.passes.support import stand_ins
from tests.passes.support.graph_builder import apply, assert_values_hold, model_of_layers, run

OF_LAYERS = [f"layers.{layer}.attn.{name}.weight" for layer in range(2) for name in "qo"]
WEIGHTS = ["embed.weight", *OF_LAYERS]
OPS = "add_lora", "add_lora_of_ids", "scale_of_adapters", "lora_shrink", "lora_expand"


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu() -> Iterator[None]:
    with stand_ins.stand_in_ops(stand_ins.LORA), pytest.MonkeyPatch.context() as patch:
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
    found = (node.target for node in piece.graph.nodes if nodes.is_op(node, *OPS))
    return [str(target).split(".")[1] for target in found]


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
        assert all(calls(after, variant) == calls(after, name) for variant in small.values())
        assert not {"add_lora", "add_lora_of_ids", "scale_of_adapters"} & set(calls(after, name))
    assert LaunchLora()(after).matches == 0


def test_a_variant_that_is_there_is_kept():
    gm = pieces()
    add_variants(gm, 256, "_streamed", copy_of)
    apply(LaunchLora(), gm)
    assert {size for sizes in gm.meta[VARIANTS].values() for size in sizes} == {256}
    names = [name for sizes in gm.meta[VARIANTS].values() for name in sizes.values()]
    assert sum(calls(gm, name).count("lora_shrink") for name in names) == 4, "qkv and o of two layers"


def test_without_adapters_pieces_stay():
    builder, logits = model_of_layers(1)
    gm = builder.canonical(logits)
    for one in (LowerAttention(), SplitAtAttention(), DeduplicatePieces()):
        gm = apply(one, gm)
    assert (LaunchLora()(gm).matches, gm.meta.get(VARIANTS, {})) == (0, {})
