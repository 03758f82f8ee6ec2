"""passes/stream_linears.py: pieces get its variant in place of `fuse_few_tokens`', and the variant computes the same.

Which linears are fused and which norms go is the two passes' in common: test_fuse_few_tokens.py. The kernels need a
Hopper GPU; here their ops are stand-ins in plain torch.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx

from mllm_compile.kernels.cuda import kernels_of
from mllm_compile.model.hf_model import build_on_meta
from mllm_compile.model.trace import trace_model
from mllm_compile.passes import stream_linears
from mllm_compile.passes.add_lora import SLOTS_INPUT
from mllm_compile.passes.base import VARIANTS
from mllm_compile.passes.canonicalise import Canonicalise
from mllm_compile.passes.deduplicate_pieces import DeduplicatePieces
from mllm_compile.passes.fuse_few_tokens import FuseFewTokens, few_token_variant
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import LINEAR, is_call
from mllm_compile.passes.pack_projections import PackProjections
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.passes.stream_linears import StreamLinears, streamed
from mllm_compile.runtime.ops import family, op
from mllm_compile.runtime.ops.stream_linear.lanes import TILE_ROWS
from mllm_compile.runtime.ops.stream_linear.linear import MAX_STREAMED_TOKENS, TOKEN_BUCKETS, LinearKind
from mllm_compile.runtime.ops.stream_linear.shapes import MAX_HEAD_TOKENS, MAX_LARGE_TOKENS
from mllm_compile.runtime.ops.stream_quantised.linear import QuantisedKind
from mllm_compile.runtime.ops.stream_quantised.shapes import BUCKETS, most_tokens
from mllm_compile.runtime.program.spec import PieceVariant, Program
from mllm_compile.runtime.quantised.numbers import quantised as quantised_weight
from mllm_compile.runtime.quantised.scheme import WeightScheme
from tests.model.tiny_configs import tiny_config
from tests.passes.support.piece_block import (
    FFN,
    HIDDEN,
    NORM_FORMS,
    Block,
    decoder_piece,
    fused_ops,
    graph_of_one_piece,
)
from tests.passes.support.stand_ins import streamed_ops_on_cpu


@pytest.fixture(scope="module", autouse=True)
def stand_ins():
    with streamed_ops_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "KERNEL_DEVICE_TYPE", "cpu")
        yield


@pytest.mark.parametrize("norm", NORM_FORMS)
def test_the_variant_computes_what_the_piece_does(norm):
    piece, inputs = decoder_piece(4, norm=norm)
    variant = few_token_variant(piece, streamed(MAX_STREAMED_TOKENS))
    assert variant is not None
    variant.graph.lint()
    assert fused_ops(variant) == ["stream_linear_residual_norm", "stream_linear"] * 2
    for ours, theirs in zip(variant(*inputs), piece(*inputs), strict=True):
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 8e-3


@pytest.fixture
def takes_all_adapters(monkeypatch):
    monkeypatch.setattr(stream_linears, "takes_adapters", lambda rows, columns, rank, parts: True)


@pytest.mark.parametrize("norm", NORM_FORMS)
def test_linears_take_their_adapters_with_them(takes_all_adapters, norm):
    piece, inputs = decoder_piece(4, norm=norm, rank=16)
    gm = apply_stream_linears(piece)
    assert set(gm.meta[VARIANTS]["piece_a"]) == {64, MAX_STREAMED_TOKENS}
    variant = gm.get_submodule(gm.meta[VARIANTS]["piece_a"][64])
    assert fused_ops(variant) == ["stream_linear_lora_residual_norm", "stream_linear_lora"] * 2
    assert not any(is_call(node, LINEAR) for node in variant.graph.nodes)
    for ours, theirs in zip(variant(*inputs), piece(*inputs), strict=True):
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 8e-3


@pytest.mark.parametrize("is_input", [True, False])
def test_slots_that_are_an_input_of_the_step_are_read_early(takes_all_adapters, is_input):
    gm = graph_of_one_piece(decoder_piece(4, rank=16)[0])
    (slots,) = (node for node in gm.graph.nodes if node.name == "adapter_slots")
    if is_input:
        slots.meta["input_name"] = SLOTS_INPUT
    StreamLinears()(gm)
    variant = gm.get_submodule(gm.meta[VARIANTS]["piece_a"][64])
    told = [node.args[7] for node in variant.graph.nodes if str(node.target).startswith("mllm.stream_linear_lora")]
    assert told == [is_input] * 4


def test_a_kernel_is_wanted_for_each_linear_with_adapters(takes_all_adapters):
    gm = apply_stream_linears(decoder_piece(4, rank=16)[0])
    variant = gm.get_submodule(gm.meta[VARIANTS]["piece_a"][64])
    kinds = {kernel.kind for kernel in family("stream_linear_lora").wanted([(variant, 64)])}
    assert {(kind.rows, kind.rank, kind.parts) for kind in kinds} == {
        (HIDDEN, 16, ((0, HIDDEN),)),
        (2 * FFN, 16, ((0, FFN), (FFN, FFN))),
        (2 * HIDDEN, 16, ((0, HIDDEN), (HIDDEN, 128), (HIDDEN + 128, 128))),
    }
    assert not family("stream_linear").wanted([(variant, 64)])


def test_adapters_that_the_kernels_do_not_take_leave_the_variant_out():
    gm = apply_stream_linears(decoder_piece(4, rank=16)[0])
    assert set(gm.meta[VARIANTS]["piece_a"]) == {MAX_STREAMED_TOKENS}


def apply_stream_linears(piece: fx.GraphModule) -> fx.GraphModule:
    return StreamLinears()(graph_of_one_piece(piece)).gm


def piece_of_linears(*rows: int, columns: int):
    block = Block()
    x = block.input("x", 1, 4, columns)
    linears = [block.call(LINEAR, x, block.input(f"w{index}", size, columns), None) for index, size in enumerate(rows)]
    return graph_of_one_piece(block.module(*linears))


def test_a_piece_with_a_linear_that_does_not_divide_has_no_such_variant():
    assert StreamLinears()(piece_of_linears(256, 1000, columns=256)).matches == 0


def test_a_piece_with_a_large_weight_reads_it_in_rows_for_eight_tokens():
    gm = piece_of_linears(6144, 256, columns=2048)
    assert StreamLinears()(gm).matches == 1
    assert gm.meta[VARIANTS] == {"piece_a": {MAX_LARGE_TOKENS: "piece_a_streamed"}}
    variants = {"piece_a": (PieceVariant("piece_a_streamed", 0, 1, MAX_LARGE_TOKENS),)}
    tilings = kernels_of(gm, Program((), (), (), "logits", variants))["stream_linear"]
    in_rows = [(tiling.kind.rows, tiling.tokens) for tiling in tilings if tiling.source == "ops/stream_linear/rows.cu"]
    assert in_rows == [(6144, 8)]
    assert {tiling.tokens for tiling in tilings} == {count for count in TOKEN_BUCKETS if count <= MAX_LARGE_TOKENS}


def test_a_head_has_a_variant_for_fewer_tokens_and_kernels_for_those():
    gm = piece_of_linears(65536, columns=2048)
    StreamLinears()(gm)
    assert gm.meta[VARIANTS] == {"piece_a": {MAX_HEAD_TOKENS: "piece_a_streamed"}}
    variants = {"piece_a": (PieceVariant("piece_a_streamed", 0, 1, MAX_HEAD_TOKENS),)}
    tilings = kernels_of(gm, Program((), (), (), "logits", variants))["stream_linear"]
    assert [tiling.tokens for tiling in tilings] == [8, 16, 32, 64]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [((6144, 256), {208}), ((256,), {256}), ((65536,), {1, 64}), ((6144, 1000), {1})],
    ids=["large", "small", "a head", "one that does not divide"],
)
def test_one_token_is_left_to_the_variant_that_has_kernels_for_few(rows, sizes):
    gm = piece_of_linears(*rows, columns=2048)
    gm.add_module("piece_a_one_token", torch.nn.Identity())
    gm.meta[VARIANTS] = {"piece_a": {1: "piece_a_one_token"}}
    StreamLinears()(gm)
    assert set(gm.meta[VARIANTS]["piece_a"]) == sizes
    assert hasattr(gm, "piece_a_one_token") is (1 in sizes)


def test_a_linear_with_a_bias_takes_it_along_whatever_is_around_it():
    """Behind a norm that goes, under a gate, and added to a residual: the last two stay apart."""
    block = Block()
    x, residual = block.input("x", 1, 4, HIDDEN), block.input("residual", 1, 4, HIDDEN)

    def biased(name: str, source: fx.Node, rows: int = HIDDEN) -> fx.Node:
        return block.call(LINEAR, source, block.input(name, rows, HIDDEN), block.input(f"{name}_bias", rows))

    after = block.call(operator.add, residual, block.call(LINEAR, x, block.input("o", HIDDEN, HIDDEN), None))
    normed = block.norm(after, block.input("norm", HIDDEN))
    gated = block.silu_mul(biased("gate_up", x, 2 * FFN))
    added = block.call(operator.add, after, biased("down", x))
    piece = block.module(biased("qkv", normed), gated, added)
    variant = few_token_variant(piece, streamed(MAX_STREAMED_TOKENS))
    assert variant is not None
    assert sorted(fused_ops(variant)) == ["stream_linear"] * 2 + [
        "stream_linear_residual",
        "stream_linear_residual_norm",
    ]
    for ours, theirs in zip(variant(*block.inputs), piece(*block.inputs), strict=True):
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 8e-3
    gm = graph_of_one_piece(piece)
    assert StreamLinears()(gm).matches == 1
    variants = {"piece_a": (PieceVariant("piece_a_streamed", 0, 1, MAX_STREAMED_TOKENS),)}
    kinds = {tiling.kind for tiling in kernels_of(gm, Program((), (), (), "logits", variants))["stream_linear"]}
    assert {(kind.rows, kind.norm_blocks, kind.bias) for kind in kinds} == {
        (HIDDEN, 0, False),
        (HIDDEN, 0, True),
        (HIDDEN, HIDDEN // TILE_ROWS, True),
        (2 * FFN, 0, True),
    }


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("spelled", ["square", "power"])
def test_the_square_of_a_relu_becomes_part_of_its_linear(spelled, has_bias):
    """Behind a norm that goes; not where something else reads the linear."""
    block = Block()
    x, residual = block.input("x", 1, 4, HIDDEN), block.input("residual", 1, 4, HIDDEN)
    after = block.call(operator.add, residual, block.call(LINEAR, x, block.input("o", HIDDEN, HIDDEN), None))
    normed = block.norm(after, block.input("norm", HIDDEN), "rounded last")
    bias = block.input("bias", FFN) if has_bias else None
    up = block.call(LINEAR, normed, block.input("up", FFN, HIDDEN), bias)
    read = block.call(LINEAR, normed, block.input("read", FFN, HIDDEN), bias)

    def squared(of: fx.Node) -> fx.Node:
        relu = block.call(torch.relu, of)
        return block.call(torch.square, relu) if spelled == "square" else block.call(operator.pow, relu, 2)

    piece = block.module(squared(up), squared(read), read)
    variant = few_token_variant(piece, streamed(MAX_STREAMED_TOKENS))
    assert variant is not None
    assert sorted(fused_ops(variant)) == ["stream_linear"] * 2 + ["stream_linear_residual_norm"]
    assert sum(node.target is torch.relu for node in variant.graph.nodes) == 1
    for ours, theirs in zip(variant(*block.inputs), piece(*block.inputs), strict=True):
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 1.6e-2
    gm = graph_of_one_piece(piece)
    StreamLinears()(gm)
    variants = {"piece_a": (PieceVariant("piece_a_streamed", 0, 1, MAX_STREAMED_TOKENS),)}
    kinds = {tiling.kind for tiling in kernels_of(gm, Program((), (), (), "logits", variants))["stream_linear"]}
    assert {(kind.squared_relu, kind.bias) for kind in kinds if kind.rows == FFN} == {
        (True, has_bias),
        (False, has_bias),
    }


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_a_residual_beside_a_bias_become_parts_of_linears(approximate):
    """The layer norm between them stays, and GELU by tanh."""
    block = Block()
    x, residual = block.input("x", 1, 4, HIDDEN), block.input("residual", 1, 4, HIDDEN)
    product = block.call(LINEAR, x, block.input("o", HIDDEN, HIDDEN), block.input("o_bias", HIDDEN))
    after = block.call(operator.add, residual, product)
    weights = block.input("norm", HIDDEN), block.input("norm_bias", HIDDEN)
    normed = block.call(torch.nn.functional.layer_norm, after, (HIDDEN,), *weights, 1e-5)
    up = block.call(LINEAR, normed, block.input("up", FFN, HIDDEN), block.input("up_bias", FFN))
    said = {} if approximate == "none" else {"approximate": approximate}
    out = block.call(torch.nn.functional.gelu, up, **said)
    piece = block.module(out, after)
    gm = graph_of_one_piece(piece)
    assert StreamLinears()(gm).matches == 1
    ((size, name),) = gm.meta[VARIANTS]["piece_a"].items()
    assert size == MAX_STREAMED_TOKENS
    variant = gm.get_submodule(name)
    assert sorted(fused_ops(variant)) == ["stream_linear", "stream_linear_residual"]
    called = {node.target for node in variant.graph.nodes}
    assert torch.nn.functional.layer_norm in called
    assert (torch.nn.functional.gelu in called) == (approximate == "tanh")
    for ours, theirs in zip(variant(*block.inputs), piece(*block.inputs), strict=True):
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 1.6e-2
    variants = {"piece_a": (PieceVariant(name, 0, 1, size),)}
    kinds = {tiling.kind for tiling in kernels_of(gm, Program((), (), (), "logits", variants))["stream_linear"]}
    assert {(kind.gelu, kind.bias) for kind in kinds if kind.rows == FFN} == {(approximate == "none", True)}
    assert {(kind.residual, kind.bias) for kind in kinds if kind.rows == HIDDEN} == {(True, True)}


def test_a_bias_that_is_computed_keeps_its_piece_from_the_variant():
    block = Block()
    bias = block.call(torch.relu, block.input("b", HIDDEN))
    biased = block.call(LINEAR, block.input("x", 1, 4, HIDDEN), block.input("w", HIDDEN, HIDDEN), bias)
    assert StreamLinears()(graph_of_one_piece(block.module(biased))).matches == 0


def test_float16_is_left_to_the_other_kernels():
    assert few_token_variant(decoder_piece(4, torch.float16)[0], streamed(8)) is None


def test_a_piece_with_this_variant_gets_no_other_for_few_tokens():
    gm = graph_of_one_piece(decoder_piece(4)[0])
    assert StreamLinears()(gm).matches == 1
    assert FuseFewTokens()(gm).matches == 0
    assert gm.meta[VARIANTS] == {"piece_a": {MAX_STREAMED_TOKENS: "piece_a_streamed"}}


@pytest.mark.parametrize("norm", NORM_FORMS)
def test_the_kernels_that_variants_call_are_each_named_once(norm):
    gm, plus_one = graph_of_one_piece(decoder_piece(4, norm=norm)[0]), norm == "plus one"
    StreamLinears()(gm)
    variants = {"piece_a": (PieceVariant("piece_a_streamed", 0, 1, MAX_STREAMED_TOKENS),)}
    tilings = kernels_of(gm, Program((), (), (), "logits", variants))["stream_linear"]
    assert len({tiling.name for tiling in tilings}) == len(tilings) == 4 * len(TOKEN_BUCKETS)
    assert [tiling.kind for tiling in tilings[:: len(TOKEN_BUCKETS)]][:3] == [
        LinearKind(HIDDEN, HIDDEN, residual=True, next_blocks=HIDDEN // TILE_ROWS, plus_one=plus_one),
        LinearKind(2 * FFN, HIDDEN, HIDDEN // TILE_ROWS, gated=True),
        LinearKind(HIDDEN, FFN, residual=True, next_blocks=HIDDEN // TILE_ROWS, plus_one=plus_one),
    ]


# Norms of Qwen3.5 and Gemma are times 1 + their weight, Nemotron-H's times their weight, both ahead of rounding.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 3}
TO_PIECES = (Canonicalise, PackProjections, LowerAttention, SplitAtAttention, DeduplicatePieces)
MODELS = {
    "qwen3_5_text": {"layer_types": ["full_attention", "linear_attention", "full_attention"], "head_dim": 64},
    "gemma": {},
    "nemotron_h": {"layer_types": ["mlp", "linear_attention", "mlp"]}
    | {"mamba_num_heads": 64, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 32},
}


@pytest.mark.parametrize(
    "name", ["qwen3_5_text", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma", "nemotron_h"))]
)
def test_of_a_models_norms_the_first_and_the_last_one_are_left(tmp_path, name):
    tiny_config(name, **SIZES | MODELS[name]).save_pretrained(tmp_path)
    gm = trace_model(build_on_meta(tmp_path, torch.bfloat16), "cpu", 8192).graph_module
    for graph_pass in (*TO_PIECES, StreamLinears):
        gm = graph_pass()(gm).gm
    variants = [gm.get_submodule(variant) for variants in gm.meta[VARIANTS].values() for variant in variants.values()]
    roots = [node for variant in variants for node in variant.graph.nodes if is_call(node, torch.rsqrt)]
    assert sum(root.meta["val"].dim() == 3 for root in roots) == 2
    assert sum("residual_norm" in name for variant in variants for name in fused_ops(variant)) >= 2


# weights in few bits --------------------------------------------------------------------------------------------------

WIDE, WIDE_FFN = 512, 1024  # whole panels of four bits, whose zero points are copied by fours
SCHEMES = {
    "fp8 rows": WeightScheme("fp8", 0),  # the group is a row's
    "fp8 groups": WeightScheme("fp8", 128),
    "int4": WeightScheme("int4_lanes", 128, torch.bfloat16),
    "int4 with zero points": WeightScheme("int4_lanes", 128, torch.float16, has_zeros=True),
}


def most_tokens_of(scheme: WeightScheme) -> int:
    return most_tokens(QuantisedKind(64, 1024, values=scheme.name, group=scheme.group))


by_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@pytest.fixture(scope="module")
def quantised():
    """The op that a trace has for a linear of a quantised weight."""
    return op("quantised_linear")


class SmallBlock(Block):
    """Builds pieces with linears of weights in few bits."""

    def __init__(self, quantised, scheme: WeightScheme) -> None:
        super().__init__()
        self._quantised, self._scheme = quantised, scheme

    def quantised(self, name: str, source: fx.Node, rows: int, bias: fx.Node | None = None) -> fx.Node:
        columns = source.meta["val"].shape[-1]
        scheme = replace(self._scheme, group=self._scheme.group or columns)
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.02
        made = {
            role: self.holding(f"{name}_{role}", tensor) for role, tensor in quantised_weight(weight, scheme).items()
        }
        operands = made["values"], made["scales"], made.get("zeros"), bias, scheme.kind, scheme.group
        return self.call(self._quantised, source, *operands)


def quantised_decoder(quantised, scheme: WeightScheme) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """As decoder_piece, but that its gate_up stays in bfloat16."""
    block = SmallBlock(quantised, scheme)
    attended, residual = block.input("attended", 1, 4, WIDE), block.input("residual", 1, 4, WIDE)
    after = block.call(operator.add, residual, block.quantised("o", attended, WIDE))
    hidden = block.norm(after, block.input("norm", WIDE))
    product = block.silu_mul(block.call(LINEAR, hidden, block.input("gate_up", 2 * WIDE_FFN, WIDE), None))
    out = block.call(operator.add, after, block.quantised("down", product, WIDE))
    qkv = block.quantised("qkv", block.norm(out, block.input("next_norm", WIDE)), 2 * WIDE)
    return block.module(out, qkv), block.inputs


@by_scheme
def test_weights_in_few_bits_have_ops_of_their_own_beside_plain_ones(quantised, scheme):
    piece, inputs = quantised_decoder(quantised, scheme)
    variant = few_token_variant(piece, streamed(most_tokens_of(scheme)))
    assert variant is not None
    variant.graph.lint()
    of_norm = "stream_quantised_linear_residual_norm"
    assert fused_ops(variant) == [of_norm, "stream_linear", of_norm, "stream_quantised_linear"]
    for ours, theirs in zip(variant(*inputs), piece(*inputs), strict=True):
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 8e-3


@by_scheme
def test_a_piece_with_such_a_weight_has_a_variant_for_fewer_tokens_and_kernels_of_both_families(quantised, scheme):
    gm = graph_of_one_piece(quantised_decoder(quantised, scheme)[0])
    gm.add_module("piece_a_one_token", torch.nn.Identity())
    gm.meta[VARIANTS] = {"piece_a": {1: "piece_a_one_token"}}
    most = most_tokens_of(scheme)
    buckets = [tokens for tokens in BUCKETS if tokens <= most]
    assert StreamLinears()(gm).matches == 1
    assert gm.meta[VARIANTS] == {"piece_a": {most: "piece_a_streamed"}}
    variants = {"piece_a": (PieceVariant("piece_a_streamed", 0, 1, most),)}
    kernels = kernels_of(gm, Program((), (), (), "logits", variants))
    blocks = WIDE // 16
    variant = {"group": scheme.group, "values": scheme.name, "zeros": scheme.has_zeros}
    variant["scales"] = str(scheme.scale_dtype).removeprefix("torch.")
    assert [tiling.kind for tiling in kernels["stream_quantised"][:: len(buckets)]] == [
        QuantisedKind(WIDE, WIDE, residual=True, next_blocks=blocks, **variant),
        QuantisedKind(WIDE, WIDE_FFN, residual=True, next_blocks=blocks, **variant),
        QuantisedKind(2 * WIDE, WIDE, blocks, **variant),
    ]
    assert {tiling.tokens for tiling in kernels["stream_quantised"]} == set(buckets)
    assert {tiling.kind for tiling in kernels["stream_linear"]} == {LinearKind(2 * WIDE_FFN, WIDE, blocks, gated=True)}


@by_scheme
def test_a_linear_in_few_bits_takes_its_bias_and_its_gate_along(quantised, scheme):
    block = SmallBlock(quantised, scheme)
    x = block.input("x", 1, 4, WIDE)
    biased = block.quantised("qkv", x, WIDE, block.input("bias", WIDE))
    residual = block.call(operator.add, x, block.quantised("o", x, WIDE))
    piece = block.module(biased, block.silu_mul(block.quantised("gate_up", x, 2 * WIDE_FFN)), residual)
    variant = few_token_variant(piece, streamed(most_tokens_of(scheme)))
    assert variant is not None
    assert sorted(fused_ops(variant)) == ["stream_quantised_linear"] * 2 + ["stream_quantised_linear_residual"]
    for ours, theirs in zip(variant(*block.inputs), piece(*block.inputs), strict=True):
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 8e-3


@pytest.mark.parametrize(
    ("rows", "scheme"),
    [
        (WIDE, WeightScheme("fp8", 64)),
        (WIDE, WeightScheme("fp8", 128, torch.bfloat16)),
        (WIDE, WeightScheme("int4", 32, torch.bfloat16)),
        (WIDE + 8, WeightScheme("fp8", 128)),
    ],
    ids=["groups of 64", "scales in bfloat16", "groups of 32", "rows that do not divide"],
)
def test_other_quantised_weights_keep_their_piece_from_the_variant(quantised, rows, scheme):
    block = SmallBlock(quantised, scheme)
    x = block.input("x", 1, 4, WIDE)
    linears = block.quantised("small", x, rows), block.call(LINEAR, x, block.input("w", WIDE, WIDE), None)
    assert StreamLinears()(graph_of_one_piece(block.module(*linears))).matches == 0
