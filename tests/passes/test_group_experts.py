"""passes/group_experts.py: experts' linears become products of blocks of rows, in variants by the size of a step."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.passes.add_lora import AddLora
from mllm_compile.passes.base import ANY_ROWS, LORA, LORA_LAYOUT, VARIANTS, WEIGHT_SCHEMES, LoraWish, WeightSchemes
from mllm_compile.passes.group_experts import GroupExperts
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import called_pieces, is_op
from mllm_compile.runtime.ops.experts.shapes import (
    ONE_ROW,
    ROWS_IN_ANY_STEP,
    VARIANT_TOKENS,
    most_blocks,
    rows_of_block,
)
from mllm_compile.runtime.quantised.scheme import WeightScheme
from tests.passes.support.every_graph import (
    CHOSEN,
    EXPERTS,
    Decoder,
    decoder_of_experts,
    decoder_of_experts_with_biases,
    experts,
)
from tests.passes.support.graph_builder import run
from tests.passes.support.stand_ins import ALL, FOR_GPUS, stand_in_ops, streamed_ops_on_cpu
from tests.passes.test_every_pass import variants_for


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu():
    with streamed_ops_on_cpu(), stand_in_ops(ALL):
        yield


def grouped(make, **facts):
    """The graph with no other kernels than these, and what it computed as traced.

    Args:
        facts: more of gm.meta.
    """
    gm = make()
    gm.meta |= facts
    numbers = run(gm, 7)
    for graph_pass in FOR_GPUS:
        if not graph_pass.needs or graph_pass is GroupExperts:
            gm = graph_pass()(gm).gm
    gm.recompile()
    return gm, numbers


def calls(piece, name: str) -> list:
    return [node.args for node in piece.graph.nodes if is_op(node, name)]


def pieces_of_experts(gm) -> list[str]:
    return [name for name in gm.meta[VARIANTS] if calls(gm.get_submodule(name), "grouped_linear")]


def test_a_piece_with_experts_has_a_variant_for_each_size_of_block():
    gm, _ = grouped(decoder_of_experts)
    for name in pieces_of_experts(gm):
        variants = gm.meta[VARIANTS][name]
        assert sorted(variants) == list(VARIANT_TOKENS)
        for most, variant in [(None, name), *variants.items()]:
            piece = gm.get_submodule(variant)
            block = rows_of_block(most, CHOSEN, EXPERTS)
            up, down = calls(piece, "grouped_linear")
            assert (up[-3:], down[-3:]) == ((True, True, block), (False, False, block)), "gate and up are activated"
            assert len(calls(piece, "order_experts")) == (block != ONE_ROW), "both linears have one order"
            assert not calls(piece, "expert_linear")
            assert [node.target for node in piece.graph.nodes if node.target is torch.nn.functional.silu] == []


@pytest.mark.parametrize("make", [decoder_of_experts, decoder_of_experts_with_biases])
def test_steps_of_any_number_of_rows_have_one_form(make):
    gm, numbers = grouped(make, **{ANY_ROWS: True})
    assert not gm.meta.get(VARIANTS)
    found = [args for name in called_pieces(gm) for args in calls(gm.get_submodule(name), "grouped_linear")]
    assert found and {args[-1] for args in found} == {ROWS_IN_ANY_STEP}
    torch.testing.assert_close(run(gm, 7), numbers)


def test_an_activation_of_the_models_own_stays_between_two_products():
    gm, _ = grouped(decoder_of_experts_with_biases)
    (name, *_) = pieces_of_experts(gm)
    up, down = calls(gm.get_submodule(name), "grouped_linear")
    assert (up[6], up[8], down[6], down[8]) == (True, False, True, False)
    assert up[4] is not None and down[4] is not None, "their biases"


@pytest.mark.parametrize("make", [decoder_of_experts, decoder_of_experts_with_biases])
@pytest.mark.parametrize("tokens", [1, 7])
def test_all_variants_compute_what_was_traced(make, tokens):
    gm, _ = grouped(make)
    traced = run(make(), tokens)
    torch.testing.assert_close(run(gm, tokens), traced)
    with variants_for(gm, tokens):
        torch.testing.assert_close(run(gm, tokens), traced)


def quantised_experts():
    """Of fp8 and of four bits; of the second layer the weights stay plain."""
    gm = decoder_of_experts()
    schemes = {"up": WeightScheme("fp8", 128), "down": WeightScheme("int4", 64)}
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes({f"layers.0.experts.{part}": one for part, one in schemes.items()})
    return gm


def test_experts_in_few_bits_are_grouped_by_a_kernel_of_their_own():
    gm, numbers = grouped(quantised_experts)
    torch.testing.assert_close(run(gm, 7), numbers)
    with variants_for(gm, 1):
        torch.testing.assert_close(run(gm, 1), run(quantised_experts(), 1))
    pieces = [gm.get_submodule(name) for name in gm.meta[VARIANTS]]
    (small,) = (piece for piece in pieces if calls(piece, "quantised_grouped_linear"))
    up, down = calls(small, "quantised_grouped_linear")
    assert (up[7:9], down[7:9]) == (("fp8", 128), ("int4", 64))
    assert (up[-2], down[-2]) == (True, False), "gate and up are activated"
    assert not calls(small, "grouped_linear")
    assert not calls(small, "quantised_expert_linear")


def test_the_program_is_told_the_slots_once_and_only_pieces_with_experts_read_them():
    gm, _ = grouped(decoder_of_experts)
    slots = [node for node in gm.graph.find_nodes(op="placeholder") if node.meta.get("input_name") == "slots"]
    assert len(slots) == 1
    assert {str(node.target) for node in slots[0].users} == set(pieces_of_experts(gm))


def test_a_linear_of_experts_whose_halves_others_read_is_not_activated_with_it():
    decoder = Decoder(dtype=torch.float32, feed_forward=_with_second_reader)
    gm, numbers = grouped(decoder.model)
    (name, *_) = pieces_of_experts(gm)
    up, _ = calls(gm.get_submodule(name), "grouped_linear")
    assert up[8] is False
    torch.testing.assert_close(run(gm, 7), numbers)


def _with_second_reader(decoder: Decoder, hidden, name):
    out = experts(decoder, hidden, name)
    first = [node for node in decoder.graph.nodes if is_op(node, "expert_linear")][-2]
    return decoder.call(torch.add, out, decoder.call(torch.mul, decoder.call(torch.amax, first), 0.1))


@pytest.mark.parametrize("parts", ["up", "down", "up down"])
def test_what_adapters_change_of_experts_stays_between_the_products(parts, monkeypatch):
    monkeypatch.setattr(nodes, "KERNEL_DTYPES", (torch.float32,))
    gm = decoder_of_experts()
    names = [f"layers.{layer}.experts.{part}" for layer in (0, 1) for part in parts.split()]
    gm.meta[LORA] = LoraWish(frozenset(names), num_slots=2, max_rank=4)
    numbers = {}
    for graph_pass in FOR_GPUS:
        gm = graph_pass()(gm).gm
        if graph_pass is AddLora:
            gm.recompile()
            numbers = {tokens: run(gm, tokens) for tokens in (1, 7, 90)}
    gm.recompile()
    assert {target.weight for target in gm.meta[LORA_LAYOUT].targets} == set(names)
    for name in pieces_of_experts(gm):
        piece = gm.get_submodule(name)
        assert not calls(piece, "add_lora_of_experts")
        assert len(calls(piece, "lora_expand")) == len(parts.split())
    for tokens, expected in numbers.items():
        torch.testing.assert_close(run(gm, tokens), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("block", [1, 16, 128])
def test_there_are_blocks_enough_however_rows_fall(block):
    """Of each expert, and of none, one block may be all but empty."""
    for counts in ([1] * 9, [block] * 9, [block + 1] * 9, [0] * 8 + [5 * block + 1], [3] + [0] * 8):
        needed = sum(-(-count // block) for count in counts)
        assert needed <= most_blocks(sum(counts), len(counts) - 1, block)
