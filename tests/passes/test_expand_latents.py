"""expand_latents: attention over latents is given the up-projection, which was applied around it."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch

from mllm_compile.bench.limits.step_parts import WeightSize, step_parts
from mllm_compile.compiler.program_builder import build_program, weight_shapes
from mllm_compile.passes.absorb_latents import AbsorbLatents
from mllm_compile.passes.base import ATTENTION_LAYERS, PassTarget
from mllm_compile.passes.expand_latents import ExpandLatents
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.match.nodes import is_call
from mllm_compile.passes.pipeline import passes_left_out, run_passes
from mllm_compile.runtime.program.spec import Program
from tests.passes.support.every_graph import latents
from tests.passes.support.graph_builder import apply, run, text
from tests.passes.support.latent_layer import HEADS, NOPE, RANK, ROPE, VALUE
from tests.passes.test_absorb_latents import attentions, model
from tests.passes.test_pipeline import KERNEL_PASSES


@pytest.mark.parametrize("how", ["scatter", "cat", "without rotation"])
def test_queries_and_outputs_are_the_heads_again_and_the_numbers_stay(how):
    gm = apply(AbsorbLatents(), model(how, how))
    before = run(gm)
    assert ExpandLatents()(gm).matches == 2
    gm.recompile()
    torch.testing.assert_close(run(gm), before, rtol=1e-5, atol=1e-5)
    for index, node in enumerate(attentions(gm)):
        q, k, v = node.args[:3]
        assert q.meta["val"].shape[1:] == (HEADS, NOPE + ROPE)
        assert k.meta["val"].shape[1:] == (1, RANK + ROPE)
        assert v is k and node.args[4] == 0.3 and node.args[10] == RANK
        assert node.args[11].meta["weight_name"] == f"layers.{index}.attn.b.weight"
        assert node.meta["val"].shape[1:] == (HEADS, VALUE)
        assert "layers." in str(node.meta["nn_module_stack"])
    assert not [node for node in gm.graph.nodes if is_call(node, torch.bmm)]


def test_the_layer_has_the_weight_and_caches_latents_as_before():
    absorbed = apply(LowerAttention(), apply(AbsorbLatents(), model("cat")))
    gm = apply(LowerAttention(), apply(ExpandLatents(), apply(AbsorbLatents(), model("cat"))))
    (without,), (layer,) = absorbed.meta[ATTENTION_LAYERS], gm.meta[ATTENTION_LAYERS]
    own = {"up_projection": "layers.0.attn.b.weight", "up_key_dim": NOPE, "up_value_dim": VALUE}
    assert layer == replace(without, **own)
    assert (layer.query_dim, layer.out_dim, layer.rotated_dim) == (NOPE + ROPE, VALUE, ROPE)
    assert (without.query_dim, without.out_dim) == (RANK + ROPE, RANK)
    torch.testing.assert_close(run(gm), run(absorbed), rtol=1e-5, atol=1e-5)


def test_a_program_keeps_the_weight_and_a_step_reads_and_multiplies_as_much():
    parts, names = [], []
    for left_out in ({"expand_latents"}, set()):
        gm, _ = run_passes(latents(), left_out=left_out | {*KERNEL_PASSES})
        program = build_program(gm)
        assert {layer.up_projection is None for layer in program.layers} == {bool(left_out)}
        assert Program.from_json(program.to_json()) == program
        weights = {name: WeightSize(*one) for name, one in weight_shapes(gm).items()}
        parts.append(step_parts(program, weights, torch.bfloat16, 4, 8))
        names.append(program.weights)
    assert names[0] == names[1]
    for what in ("weight_bytes", "kv_bytes", "flops"):
        without, with_it = (sum(getattr(part, what) for part in found) for found in parts)
        assert without == with_it, what


def test_models_whose_keys_are_of_every_head_are_left_alone():
    gm = model("cat")
    before = text(gm)
    assert ExpandLatents()(gm).matches == 0
    assert text(gm) == before


def test_products_that_something_else_reads_stay_in_every_layer():
    gm = apply(AbsorbLatents(), model("cat", "cat"))
    (of_values,) = attentions(gm)[1].users
    with gm.graph.inserting_after(of_values):
        further = gm.graph.call_function(operator.neg, (attentions(gm)[1],))
    further.meta["val"] = attentions(gm)[1].meta["val"]
    before = text(gm)
    assert ExpandLatents()(gm).matches == 0
    assert text(gm) == before


def test_it_is_left_out_where_a_prompt_must_be_computed_in_one_way():
    target = PassTarget("cuda", True, True, True, "bfloat16", "bfloat16", attention_backend="flashinfer")
    assert "expand_latents" not in passes_left_out(target)
    left_out = passes_left_out(replace(target, deterministic=True))
    assert left_out["expand_latents"].startswith("runtime.deterministic")
    assert "absorb_latents" not in left_out
