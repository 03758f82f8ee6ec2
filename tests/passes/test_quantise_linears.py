"""quantise_linears: which linears get their weights in few bits, and that the passes behind it take them along."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from mllm_compile.bench.limits.step_parts import WeightSize, limit_s, step_parts
from mllm_compile.bench.measure.results import Ceilings
from mllm_compile.compiler.program_builder import build_program, weight_shapes
from mllm_compile.passes.base import (
    PACKED_WEIGHTS,
    QUANTISED_TENSORS,
    WEIGHT_CUTS,
    WEIGHT_SCHEMES,
    PackedPart,
    QuantisedTensor,
    WeightCut,
    WeightSchemes,
)
from mllm_compile.passes.canonicalise import Canonicalise
from mllm_compile.passes.match.nodes import LINEAR
from mllm_compile.passes.match.quantised import match_quantised_linear
from mllm_compile.passes.pack_projections import PackProjections
from mllm_compile.passes.pipeline import run_passes
from mllm_compile.passes.quantise_linears import QuantiseLinears
from mllm_compile.runtime.ops.experts.shapes import takes_part
from mllm_compile.runtime.program.spec import Program, QuantisedWeight
from mllm_compile.runtime.quantised.scheme import MXFP4, NVFP4, WeightScheme, quantised_as
from tests.passes.support.every_graph import EXPERTS, Decoder, decoder_of_experts, decoder_of_experts_with_biases
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, apply, model_of_layers, run, targets

FP8 = WeightScheme("fp8", HIDDEN)
INT4 = WeightScheme("int4", 8, torch.bfloat16, has_zeros=True)


def with_schemes(gm: fx.GraphModule, schemes: dict[str, WeightScheme], are_chosen: bool = False) -> fx.GraphModule:
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes(schemes, are_chosen=are_chosen)
    return gm


def of_all(gm: fx.GraphModule) -> dict[str, WeightScheme]:
    """fp8 for every matrix."""
    nodes = [node for node in gm.graph.nodes if "weight_name" in node.meta and node.meta["val"].dim() == 2]
    return {node.meta["weight_name"]: quantised_as("fp8", node.meta["val"].shape[1]) for node in nodes}


def quantised(gm: fx.GraphModule) -> set[str]:
    return {tensor.weight_name for tensor in gm.meta[QUANTISED_TENSORS].values()}


def one_layer() -> fx.GraphModule:
    builder, logits = model_of_layers(1)
    return builder.canonical(logits)


def test_a_weight_becomes_inputs_of_its_tensors():
    name = "layers.0.attn.o.weight"
    gm = with_schemes(one_layer(), {name: INT4})
    before = run(gm)
    result = QuantiseLinears()(gm)
    assert result.matches == 1
    gm.recompile()
    assert gm.meta[QUANTISED_TENSORS] == {
        name: QuantisedTensor(name, "values", INT4, (HIDDEN, HIDDEN)),
        name + "_scales": QuantisedTensor(name, "scales", INT4, (HIDDEN, HIDDEN)),
        name + "_zeros": QuantisedTensor(name, "zeros", INT4, (HIDDEN, HIDDEN)),
    }
    inputs = [node.meta.get("weight_name", "") for node in gm.graph.find_nodes(op="placeholder")]
    assert [one for one in inputs if one.startswith(name)] == list(gm.meta[QUANTISED_TENSORS])
    assert targets(gm).count("linear") == 4, "q, k, v, head"
    torch.testing.assert_close(run(gm), before)


def test_the_checkpoints_own_are_taken_wherever_only_a_linear_reads_them():
    gm = one_layer()
    schemes = of_all(gm)
    apply(QuantiseLinears(), with_schemes(gm, schemes))
    assert quantised(gm) == {name for name in schemes if name != "embed.weight"}


def test_what_is_quantised_by_choice_spares_heads_routers_and_small_gates():
    builder = GraphBuilder()
    x = builder.embed()
    x = builder.call(torch.add, builder.layer(x, 0), builder.linear(x, "gate", 1))
    gm = builder.canonical(builder.call(torch.tanh, builder.head(x)))
    apply(QuantiseLinears(), with_schemes(gm, of_all(gm), are_chosen=True))
    assert quantised(gm) == {"layers.0.attn.q.weight", "layers.0.attn.o.weight"}, "k and v have eight rows"


@pytest.mark.parametrize("in_panels", [False, True])
def test_a_head_that_is_asked_for_is_quantised_whatever_becomes_of_the_rest(in_panels, monkeypatch):
    monkeypatch.setattr("mllm_compile.passes.quantise_linears._FEWEST_ROWS", 1)
    for are_chosen in (False, True):
        gm = one_layer()
        name = "head.weight"
        schemes = WeightSchemes({name: FP8}, are_chosen=are_chosen, takes_head=True, in_panels=in_panels)
        gm.meta[WEIGHT_SCHEMES] = schemes
        apply(QuantiseLinears(), gm)
        assert quantised(gm) == {name}, "where no panels take its scheme the op dequantises it"


def test_hidden_states_beside_the_logits_spare_no_linear():
    builder = GraphBuilder()
    x = builder.layer(builder.embed(), 0)
    logits = builder.head(x)
    builder.graph.output((logits, x))
    gm = apply(Canonicalise(), fx.GraphModule(torch.nn.Module(), builder.graph))
    apply(QuantiseLinears(), with_schemes(gm, of_all(gm), are_chosen=True))
    assert quantised(gm) == {"layers.0.attn.q.weight", "layers.0.attn.o.weight"}, "k and v have eight rows"


def test_a_router_of_many_experts_is_spared():
    gm = decoder_of_experts()
    schemes = {name: scheme for name, scheme in of_all(gm).items() if "router" in name}
    assert len(schemes) == 2 and EXPERTS < 16
    apply(QuantiseLinears(), with_schemes(gm, schemes))
    assert quantised(gm) == set(schemes), "a checkpoint may have it so"
    from mllm_compile.passes import quantise_linears

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantise_linears, "_FEWEST_ROWS", 1)
        gm = decoder_of_experts()
        apply(QuantiseLinears(), with_schemes(gm, of_all(gm), are_chosen=True))
    found = quantised(gm)
    assert {f"layers.{layer}.{part}.weight" for layer in (0, 1) for part in "qkvo"} == found


def tied(builder: GraphBuilder) -> fx.Node:
    x, weight = builder.embed(), builder.weight("tied.weight", HIDDEN, HIDDEN)
    return builder.call(torch.add, *(builder.call(LINEAR, x, weight, None) for _ in range(2)))


def computed(builder: GraphBuilder) -> fx.Node:
    return builder.call(LINEAR, builder.embed(), builder.call(torch.neg, builder.weight("w", HIDDEN, HIDDEN)), None)


@pytest.mark.parametrize("make", [tied, computed])
def test_a_weight_that_something_else_reads_stays_plain(make):
    builder = GraphBuilder()
    gm = builder.canonical(builder.head(make(builder)))
    schemes = {name: scheme for name, scheme in of_all(gm).items() if name != "head.weight"}
    assert QuantiseLinears()(with_schemes(gm, schemes)).matches == 0


def test_without_weights_that_may_be_small_nothing_is_done():
    assert QuantiseLinears()(one_layer()).matches == 0


def packed(schemes: dict[str, WeightScheme]) -> fx.GraphModule:
    names = {f"layers.0.attn.{part}.weight": scheme for part, scheme in schemes.items()}
    gm = apply(QuantiseLinears(), with_schemes(one_layer(), names))
    before = run(gm)
    gm = apply(PackProjections(), gm)
    torch.testing.assert_close(run(gm), before)
    return gm


@pytest.mark.parametrize("scheme", [FP8, INT4, NVFP4])
def test_linears_of_one_scheme_are_packed_with_all_their_tensors(scheme):
    gm = packed(dict.fromkeys("qkv", scheme))
    parts = {"": "values", "_scales": "scales", "_zeros": "zeros", "_factors": "factors"}
    assert gm.meta[PACKED_WEIGHTS] == {
        f"layers.0.attn.q+k+v.weight{suffix}": tuple(
            PackedPart(f"layers.0.attn.{part}.weight{suffix}", start, rows)
            for part, start, rows in (("q", 0, 16), ("k", 16, 8), ("v", 24, 8))
        )
        for suffix, role in parts.items()
        if role in scheme.roles
    }
    assert targets(gm).count("linear") == 2, "o, head"


def test_linears_of_several_schemes_are_packed_each_with_its_like():
    gm = packed({"q": FP8, "k": INT4, "v": INT4})
    assert {name.removeprefix("layers.0.attn.") for name in gm.meta[PACKED_WEIGHTS]} == {
        f"k+v.weight{suffix}" for suffix in ("", "_scales", "_zeros")
    }
    gm = packed({"q": FP8, "v": WeightScheme("fp8", 8)})
    assert not gm.meta[PACKED_WEIGHTS]


def test_a_program_knows_the_matrices_of_its_quantised_weights():
    decoder = Decoder()
    gm = decoder.model()
    schemes = {f"layers.0.{part}.weight": quantised_as("int4", 256) for part in ("gate", "up")}
    gm, _ = run_passes(with_schemes(gm, schemes), left_out=set(KERNEL_PASSES))
    program = build_program(gm)
    name = "layers.0.gate+up.weight"
    assert program.quantised_weights == {name: QuantisedWeight(name + "_scales", None, 2 * decoder.ffn, 256)}
    assert Program.from_json(program.to_json()).quantised_weights == program.quantised_weights
    assert name + "_scales" in program.weights


def test_a_step_reads_fewer_bytes_of_quantised_weights_and_multiplies_as_many_numbers():
    parts = []
    for kind in (None, "fp8", "int4"):
        gm = Decoder().model()
        scheme = None if kind is None else quantised_as(kind, 256)
        schemes = (
            {} if scheme is None else {f"layers.{layer}.{part}.weight": scheme for layer in (0, 1) for part in "qkv"}
        )
        gm, _ = run_passes(with_schemes(gm, schemes), left_out=set(KERNEL_PASSES))
        weights = {name: WeightSize(*one) for name, one in weight_shapes(gm).items()}
        parts.append(step_parts(build_program(gm), weights, torch.bfloat16, 4, 8))
    numbers = 2 * 3 * 1024 * 256
    plain, fp8, int4 = (sum(part.weight_bytes for part in found) for found in parts)
    assert plain - fp8 == numbers - 2 * 3 * 1024 * 4
    assert plain - int4 == numbers * 2 - numbers // 2 - 2 * 3 * 1024 * 2 * 2
    plain, fp8, int4 = (
        [sum(getattr(part, what) for part in found) for what in ("flops", "fp8_flops")] for found in parts
    )
    assert fp8[1] == 2 * 4 * numbers and plain[1] == int4[1] == 0, "of 4 requests; numbers of four bits become bfloat16"
    assert sum(plain) == sum(fp8) == sum(int4)
    slow = Ceilings(read_bytes_s=1e15, flops_s=1e9, fp8_flops_s=2e9)
    limits = [limit_s(found, slow) for found in parts]
    assert limits == pytest.approx([sum(plain) / 1e9, fp8[0] / 1e9 + fp8[1] / 2e9, sum(int4) / 1e9])


def test_rows_are_gathered_ahead_of_quantised_linears():
    gm = Decoder().model()
    schemes = {
        f"layers.1.{part}.weight": quantised_as("fp8", 512 if part == "down" else 256) for part in ("up", "down")
    }
    gm, reports = run_passes(with_schemes(gm, schemes), left_out=set(KERNEL_PASSES))
    assert {report.name: report.matches for report in reports}["gather_rows_early"] == 1
    pieces = [gm.get_submodule(str(node.target)) for node in gm.graph.find_nodes(op="call_module")]
    of_pieces = [[match_quantised_linear(node) for node in piece.graph.nodes] for piece in pieces]
    assert [sum(one is not None for one in found) for found in of_pieces] == [0, 0, 2, 0]


KERNEL_PASSES = ("fuse_rope_cache", "rotate_in_attention", "fuse_single_token", "stream_linears", "fuse_few_tokens")
KERNEL_PASSES += (
    "quantise_activations",
    "choose_experts",
    "count_experts",
    "group_experts",
    "sum_experts",
    "tile_experts",
)
KERNEL_PASSES += ("fuse_gated_linear", "fuse_silu_mul", "dequantise_weights")


def test_experts_keep_the_way_round_that_linears_have():
    for make, where in ((decoder_of_experts, "schemes"), (decoder_of_experts_with_biases, "transposed")):
        gm, name = make(), "layers.0.experts.up"
        given = {"schemes": {}, "transposed": {}} | {where: {name: MXFP4}}
        gm.meta[WEIGHT_SCHEMES] = WeightSchemes(given["schemes"], given["transposed"])
        before = run(gm)
        assert QuantiseLinears()(gm).matches == 1
        gm.recompile()
        torch.testing.assert_close(run(gm), before)
        values, scales = (gm.meta[QUANTISED_TENSORS][name + suffix] for suffix in ("", "_scales"))
        assert (values.role, values.is_transposed) == ("values", where == "transposed")
        inputs = {node.meta.get("weight_name"): node for node in gm.graph.find_nodes(op="placeholder")}
        experts, rows, columns = values.shape
        assert inputs[name].meta["val"].shape == (experts, rows, columns // 2)
        assert inputs[name + "_scales"].meta["val"].shape == (experts, rows, columns // 32) and scales.role == "scales"
        assert QuantiseLinears()(gm).matches == 0


@pytest.mark.parametrize("scheme", [WeightScheme("int4", 32), NVFP4], ids=lambda scheme: scheme.kind)
def test_experts_that_no_kernel_takes_stay_plain(scheme):
    gm = decoder_of_experts()
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes({"layers.0.experts.up": scheme})
    assert QuantiseLinears()(gm).matches == 0


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_that_ranks_cut_within_what_shares_a_scale_stay_plain(is_transposed):
    make = decoder_of_experts_with_biases if is_transposed else decoder_of_experts
    name, dim = "layers.0.experts.down", 1 if is_transposed else 2
    inputs = next(node for node in make().graph.nodes if node.meta.get("weight_name") == name).meta["val"].shape[dim]
    assert inputs == 2 * MXFP4.group
    for length, is_small in ((32, True), (30, False)):
        gm = make()
        ranges = (((0, length),), ((length, inputs - length),))
        gm.meta[WEIGHT_CUTS] = {name: (WeightCut(dim, ranges),)}
        gm.meta[WEIGHT_SCHEMES] = WeightSchemes(*({}, {name: MXFP4}) if is_transposed else ({name: MXFP4},))
        assert QuantiseLinears()(gm).matches == is_small


def test_a_cut_of_experts_is_one_of_each_of_their_tensors():
    shape = (4, 64, 256)
    tensors = [QuantisedTensor("w", role, MXFP4, shape, is_transposed=True) for role in MXFP4.roles]
    of_rows, of_inputs = (WeightCut(dim, (((0, 32),), ((32, 32),))) for dim in (2, 1))
    assert [one.cut(of_rows) for one in tensors] == [WeightCut(1, of_rows.ranges)] * 2
    assert [one.cut(of_inputs).dim for one in tensors] == [2, 2]
    assert [one.cut(of_inputs).ranges for one in tensors] == [(((0, 16),), ((16, 16),)), (((0, 1),), ((1, 1),))]


@pytest.mark.parametrize(
    ("scheme", "inputs", "num_ranks", "is_taken"),
    [
        (MXFP4, 2880, 2, True),
        (MXFP4, 2880, 4, False),  # 90 groups
        (WeightScheme("fp8", 128), 768, 2, True),
        (WeightScheme("fp8", 128), 768, 4, False),
        (WeightScheme("fp8", 768), 768, 4, True),  # a scale a row
        (WeightScheme("int4", 32), 768, 2, False),  # no kernel takes it
    ],
)
def test_experts_are_cut_by_groups_where_each_rank_has_as_many(scheme, inputs, num_ranks, is_taken):
    assert takes_part(scheme, inputs, num_ranks) is is_taken
