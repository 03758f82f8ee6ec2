"""passes/stream_expert_rows.py: experts in MXFP4 in variants for few tokens become calls of a kernel.

The kernel needs a Hopper GPU; here its op is a stand-in in plain torch.
"""

from __future__ import annotations

import json
import operator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import fx
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from mllm_compile.compiler import lowering, rewriting
from mllm_compile.compiler.lora import with_lora
from mllm_compile.compiler.lowered import Lowered
from mllm_compile.compiler.target import find_target
from mllm_compile.config.schema import EngineConfig
from mllm_compile.kernels.cuda import kernels_of
from mllm_compile.passes.base import (
    EXPERT_RANKS,
    NO_CUDA_COMPILER,
    NO_VARIANTS,
    VARIANTS,
    WEIGHT_SCHEMES,
    PassTarget,
    WeightSchemes,
)
from mllm_compile.passes.match.linear import match_clamped_swiglu
from mllm_compile.passes.match.nodes import is_call, is_op
from mllm_compile.passes.stream_expert_rows import StreamExpertRows
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.ops.experts.shapes import ONE_ROW
from mllm_compile.runtime.ops.stream_expert_rows.kernel import ExpertRowsKernel
from mllm_compile.runtime.program.spec import PieceVariant, Program
from mllm_compile.runtime.quantised.scheme import MXFP4, WeightScheme
from tests.passes.support.every_graph import (
    CHOSEN,
    EXPERT_FFN,
    EXPERTS,
    Decoder,
    clamped_swiglu,
    decoder_of_experts_in_bfloat16,
    decoder_of_experts_in_mxfp4,
    experts_with_biases_of_which_some_are_quantised,
)
from tests.passes.support.graph_builder import run
from tests.passes.support.stand_ins import ALL, FOR_GPUS, stand_in_ops, streamed_ops_on_cpu

HIDDEN = 256
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/lab/quantised.md"
OPS = ("order_experts", "quantised_grouped_linear", "stream_expert_rows")


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu():
    with streamed_ops_on_cpu(), stand_in_ops(ALL):
        yield


def streamed(make, more=()) -> tuple[fx.GraphModule, int]:
    """The graph with no other kernels than these and what they are on."""
    gm, matches = make(), 0
    for graph_pass in FOR_GPUS:
        if not graph_pass.needs or graph_pass.name in (
            "quantise_linears",
            "group_experts",
            "stream_expert_rows",
            *more,
        ):
            result = graph_pass()(gm)
            gm, matches = result.gm, result.matches if graph_pass is StreamExpertRows else matches
    gm.recompile()
    return gm, matches


def ops_in(piece) -> list[str]:
    return [name for node in piece.graph.nodes for name in OPS if is_op(node, name)]


def test_variants_of_few_tokens_are_streamed_with_their_activation_and_no_others():
    gm, matches = streamed(decoder_of_experts_in_mxfp4)
    assert matches > 0
    for name, variants in gm.meta[VARIANTS].items():
        if not ops_in(gm.get_submodule(name)):
            continue
        assert ops_in(gm.get_submodule(name)) == ["order_experts", *2 * ["quantised_grouped_linear"]]
        few = gm.get_submodule(variants[1])
        assert ops_in(few) == 2 * ["stream_expert_rows"]
        assert not any(is_call(node, torch.sigmoid, torch.clamp) for node in few.graph.nodes)
        up, down = [node.args for node in few.graph.nodes if is_op(node, "stream_expert_rows")]
        assert (up[6:], down[6:]) == (
            (CHOSEN, True, True, 1.702, 0.5, False, 1),
            (CHOSEN, False, False, 0.0, 0.0, True, 1),
        )


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_streamed_piece_computes_what_was_traced(num_tokens):
    gm, _ = streamed(decoder_of_experts_in_mxfp4)
    plain = run(gm, num_tokens)
    for name, variants in gm.meta[VARIANTS].items():
        if ops_in(gm.get_submodule(name)):
            size = 1 if num_tokens == 1 else 64
            gm.set_submodule(name, gm.get_submodule(variants[size]))
    torch.testing.assert_close(run(gm, num_tokens), plain, rtol=2e-2, atol=2e-2)


def test_a_program_has_the_kernels_of_its_variants():
    gm, _ = streamed(decoder_of_experts_in_mxfp4)
    variants = {
        piece: tuple(PieceVariant(variant, 0, 1, most) for most, variant in of_piece.items() if most == 1)
        for piece, of_piece in gm.meta[VARIANTS].items()
    }
    kernels = kernels_of(gm, Program((), (), (), "logits", variants))["stream_expert_rows"]
    sizes = (EXPERTS, CHOSEN)
    assert kernels == (
        ExpertRowsKernel(*sizes, 2 * EXPERT_FFN, HIDDEN, ONE_ROW, True, True, True, False),
        ExpertRowsKernel(*sizes, HIDDEN, EXPERT_FFN, ONE_ROW, False, False, True, True),
    )


def lowered_for_hopper(folder, monkeypatch, **sections) -> Lowered:
    """Two layers of gpt-oss' published shape behind all passes; none of them runs.

    Angles are transposed, as Transformers 5.17 makes them; 5.23 does not.
    """

    def angles(self, x, position_ids):
        freqs = (self.inv_freq[None, :, None].float() @ position_ids[:, None, :].float()).transpose(1, 2)
        return tuple((one * self.attention_scaling).to(x.dtype) for one in (freqs.cos(), freqs.sin()))

    monkeypatch.setattr(GptOssRotaryEmbedding, "forward", angles)
    shape = json.loads((ROOT / "configs/shapes/gpt-oss-20b/config.json").read_text())
    shape |= {"num_hidden_layers": 2, "layer_types": shape["layer_types"][:2], "vocab_size": 1024, "pad_token_id": 0}
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(shape | {"eos_token_id": 1}))
    real = rewriting.pass_target
    facts = {"compiles_pieces": True, "compiles_cuda": True, "hopper_decode": True, "has_panels": False}
    monkeypatch.setattr(rewriting, "pass_target", lambda config: replace(real(config), **facts))
    model = {"path": str(folder / "model"), "load_format": "dummy", "dtype": "bfloat16", "quantization": "keep"}
    sections |= {"model": model, "runtime": {"device": "cpu", "max_model_len": 4096}}
    target = find_target(EngineConfig.from_dict(sections))
    (folder / "graphs").mkdir()
    with torch.no_grad():
        built = lowering.build_model(target.config, target.model, Timeline())
        lowered = lowering.lower(target.config, built, folder / "graphs", Timeline())
        return with_lora(target.config, lowered, folder / "graphs", Timeline())


def our_ops(piece) -> list[str]:
    return [str(node.target).split(".")[1] for node in piece.graph.nodes if "mllm." in str(node.target)]


def ops_of_few(gm: fx.GraphModule) -> list[list[str]]:
    """Our ops in each variant for one token."""
    return [our_ops(gm.get_submodule(variants[1])) for variants in gm.meta[VARIANTS].values() if 1 in variants]


def test_gpt_oss_is_rewritten_as_for_a_hopper_gpu(tmp_path, monkeypatch):
    gm = lowered_for_hopper(tmp_path, monkeypatch).graph
    found = ops_of_few(gm)
    experts = ["stream_linear_residual", "stream_linear", "choose_experts", "stream_expert_rows", "stream_expert_rows"]
    assert found == [[*experts, "stream_linear", "rope_and_cache"], experts]
    of_many = [our_ops(gm.get_submodule(name)) for name, variants in gm.meta[VARIANTS].items() if 1280 in variants]
    experts = ["choose_experts", "order_experts", *2 * ["dequantised_experts", "expert_tiles"], "sum_experts"]
    assert of_many == [[*experts, "rope_and_cache"], experts]


def test_with_adapters_of_experts_weights_are_streamed_and_adapters_add_to_them(tmp_path, monkeypatch):
    """Adapters add to rows ahead of the activation, which is then no part of the kernel. Other linears have DoRA's."""
    lora = {"max_adapters": 2, "max_rank": 8, "targets": ["all-linear", "experts"], "dora": True}
    lowered = lowered_for_hopper(tmp_path, monkeypatch, lora=lora)
    found = [ops for ops in ops_of_few(lowered.of_lora[0].graph) if "choose_experts" in ops]
    assert len(found) == 2
    for ops in found:
        start = ops.index("stream_expert_rows")
        assert ops[start : start + 6] == 2 * ["stream_expert_rows", "lora_shrink", "lora_expand"]


def test_modes_and_gpus_without_it_say_why():
    target = PassTarget("cuda", True, False, True, "bfloat16", "bfloat16")
    assert StreamExpertRows.obstacle(target) == NO_CUDA_COMPILER
    target = replace(target, compiles_cuda=True)
    assert StreamExpertRows.obstacle(target) is None
    assert StreamExpertRows.obstacle(replace(target, any_rows=True)) == NO_VARIANTS


def activation(change: str) -> fx.Node:
    """A clamped swiglu of neighbours, or one that is another thing."""
    decoder = Decoder(dtype=torch.bfloat16)
    pairs, factor = (decoder.weight(name, 4, 16, dtype=torch.bfloat16) for name in ("pairs", "factor"))
    starts = (1, None) if change == "ups first" else (None, 1)
    gate, up = (decoder.call(operator.getitem, pairs, (Ellipsis, slice(start, None, 2))) for start in starts)
    out = clamped_swiglu(decoder, gate, up)
    clamps = [node for node in decoder.graph.nodes if is_call(node, torch.clamp)]
    if change == "another bound of ups":
        clamps[1].args = (up, -0.5, 0.75)
    elif change == "a lower bound of gates":
        clamps[0].args = (gate, -0.5, 0.5)
    elif change == "another reader":
        decoder.call(operator.add, clamps[0], 1)
    elif change == "another sum":
        next(node for node in decoder.graph.nodes if is_call(node, operator.add)).args = (clamps[1], 2)
    elif change == "a learned factor":
        sigmoid = next(node for node in decoder.graph.nodes if is_call(node, torch.sigmoid))
        sigmoid.args[0].args = (clamps[0], factor)
    return out


def test_the_activation_is_told_from_others():
    found = match_clamped_swiglu(activation(""))
    assert found is not None and (found.alpha, found.limit) == (1.702, 0.5)
    changes = "ups first", "another bound of ups", "a lower bound of gates", "another reader", "another sum"
    for change in (*changes, "a learned factor"):
        assert match_clamped_swiglu(activation(change)) is None, change


def with_meta(make, **meta):
    gm = make()
    gm.meta.update(meta)
    return gm


def in_few_bits(scheme: WeightScheme) -> WeightSchemes:
    return WeightSchemes({f"layers.{layer}.experts.{part}": scheme for layer in (0, 1) for part in ("up", "down")})


def qwens(scheme: WeightScheme):
    return partial(with_meta, decoder_of_experts_in_bfloat16, **{WEIGHT_SCHEMES: in_few_bits(scheme)})


# What else a config or a model may have, and how many calls there are of it. docs/lab/quantised.md has the same lines.
FEATURES = {
    "gpt-oss' experts in MXFP4": (decoder_of_experts_in_mxfp4, "both linears and the activation"),
    "`expert_stats`, `routed_experts`": (decoder_of_experts_in_mxfp4, "both linears and the activation"),
    "experts over ranks": (
        partial(with_meta, decoder_of_experts_in_mxfp4, **{EXPERT_RANKS: 2}),
        "both linears and the activation",
    ),
    "silu(gate) · up in MXFP4": (qwens(MXFP4), "down"),
    "float16, float32": (experts_with_biases_of_which_some_are_quantised, "no"),
    "experts in fp8": (qwens(WeightScheme("fp8", 64)), "no"),
    "experts in four-bit integers": (qwens(WeightScheme("int4", 64, torch.bfloat16)), "no"),
    "experts in bfloat16": (decoder_of_experts_in_bfloat16, "no"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_it_is_there_beside_what_the_page_says(feature):
    make, says = FEATURES[feature]
    gm, matches = streamed(make, ("count_experts",) if "stats" in feature else ())
    few = [gm.get_submodule(variants[1]) for variants in gm.meta[VARIANTS].values() if 1 in variants]
    calls = [node for piece in few for node in piece.graph.nodes if is_op(node, "stream_expert_rows")]
    are_gated = {node.args[8] for node in calls}
    assert are_gated == {"no": set(), "down": {False}}.get(says, {True, False})
    assert (matches > 0) is bool(calls)
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {feature} |")]
    assert [line.split("|")[2].strip() for line in lines] == [says]
