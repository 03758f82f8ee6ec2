"""passes/rotate_in_attention.py on traced models: what attention is told, and that a served model says what it said.

The op and attention that rotates itself are stand-ins in plain torch (conftest.py, and here).
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import fx

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.compiler.pieces import size_symbols
from mllm_compile.compiler.program_builder import build_program
from mllm_compile.model.hf_model import build_on_meta
from mllm_compile.model.trace import trace_model
from mllm_compile.passes import rotate_in_attention
from mllm_compile.passes.base import ATTENTION_LAYERS
from mllm_compile.passes.canonicalise import Canonicalise
from mllm_compile.passes.fuse_rope_cache import FuseRopeCache
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.match.nodes import input_node, is_attention_with_output
from mllm_compile.passes.pack_projections import PackProjections
from mllm_compile.passes.rotate_in_attention import RotateInAttention
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.hopper.shapes import fuses_rope_of_heads
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import AttentionStep, PieceStep
from tests.model.encoder_decoders import greedy, save_encoder_decoder, sources_of_ids
from tests.passes.support.stand_ins import rope_and_cache
from tests.tiny_model import TINY, Reference, tiny_config


@pytest.fixture
def any_heads(rope_on_cpu, monkeypatch):
    """The tiny model's heads are not those that the kernels take."""
    for name in ("fuses_rope_of_heads", "writes_keys_of_heads"):
        monkeypatch.setattr(rotate_in_attention, name, lambda *heads: True)


@pytest.fixture
def rotating(monkeypatch) -> list[int]:
    """Attention that rotates in batches of decodes alone; how many requests each had, once a layer."""
    seen: list[int] = []

    def forward_with_rope(self, rope_inputs: RopeInputs, layer, batch, out):
        keys, values = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        x = rope_inputs
        q, k = rope_and_cache(
            x.q, x.k, x.v, x.cos, x.sin, x.q_weight, x.k_weight, x.eps, batch.out_cache_loc, keys, values
        )
        self.forward(AttentionInputs(q, k, x.v, out, layer, batch))
        seen.append(len(q))

    def fuses_rope(self, layer) -> bool:
        return self._plan.num_decodes == len(self._plan.seq_lens)

    monkeypatch.setattr(TorchAttnBackend, "rope", property(lambda self: self))
    monkeypatch.setattr(TorchAttnBackend, "fuses_rope", fuses_rope, raising=False)
    monkeypatch.setattr(TorchAttnBackend, "forward_with_rope", forward_with_rope, raising=False)
    return seen


@pytest.fixture(scope="module")
def traced() -> fx.GraphModule:
    """The tiny model's trace; each test rewrites a copy."""
    return trace_model(build_on_meta(TINY, torch.float32, False), "cpu", 8192).graph_module


def rewritten(traced, change_layers=lambda layers: layers):
    gm = fx.GraphModule(traced, copy.deepcopy(traced.graph))
    gm.meta |= traced.meta
    for graph_pass in (Canonicalise(), PackProjections(), LowerAttention(), FuseRopeCache()):
        gm = graph_pass(gm).gm
    gm.meta[ATTENTION_LAYERS] = change_layers(gm.meta[ATTENTION_LAYERS])
    return RotateInAttention()(gm)


def test_attention_is_told_what_its_q_and_k_are_made_of(any_heads, traced):
    result = rewritten(traced)
    gm = SplitAtAttention()(result.gm).gm
    program = build_program(gm)
    attentions = [step for step in program.steps if isinstance(step, AttentionStep)]
    assert result.matches == len(attentions) > 0
    makers = [step for step in program.steps if isinstance(step, PieceStep) and step.writes_kv_of]
    for attention, maker in zip(attentions, makers, strict=True):
        q, k, cos, sin, *norms = attention.rope_inputs.values
        assert {q, k} < set(maker.outputs)
        assert {q, k}.isdisjoint({attention.q, attention.k})
        assert {cos, sin} < {*makers[0].outputs}, "made once"
        assert set(norms) <= set(program.weights)
        assert set(attention.rope_inputs.values) < set(attention.reads)
    assert Program.from_json(program.to_json()) == program


def test_the_slots_get_a_size_of_their_own(any_heads, traced):
    gm = rewritten(traced).gm
    assert sorted(size_symbols(gm).values()) == ["L", "P", "S", "T"]
    size = input_node(gm, "slots").meta["val"].shape[0]
    assert str(size.node.expr) not in {str(input_node(gm, name).meta["val"].shape[0]) for name in ("input_ids", "keys")}


@pytest.mark.parametrize(
    "changes",
    [{"window_left": 63}, {"logits_soft_cap": 30.0}],
    ids=["window", "soft cap"],
)
def test_layers_that_no_kernel_serves_are_left_alone(any_heads, traced, changes):
    result = rewritten(traced, lambda layers: [replace(layers[0], **changes), *layers[1:]])
    told = [len(node.args) > 6 for node in result.gm.graph.nodes if is_attention_with_output(node)]
    assert told == [False] + [True] * (len(told) - 1)


def test_sinks_are_no_obstacle(any_heads, traced):
    result = rewritten(traced, lambda layers: [replace(layers[0], sinks="sinks"), *layers[1:]])
    assert all(len(node.args) > 6 for node in result.gm.graph.nodes if is_attention_with_output(node))


def test_heads_that_no_kernel_takes_are_left_alone(rope_on_cpu, monkeypatch, traced):
    monkeypatch.setattr(rotate_in_attention, "fuses_rope_of_heads", lambda *heads: False)
    gm = rewritten(traced).gm
    assert all(len(node.args) == 6 for node in gm.graph.nodes if is_attention_with_output(node))
    assert "L" not in size_symbols(gm).values(), "there are as many slots as tokens"


@pytest.mark.parametrize(
    ("heads", "taken"),
    [
        ((16, 8, 128), True),
        ((32, 4, 128), True),
        ((16, 2, 128), True),
        ((8, 1, 256), True),
        ((16, 8, 64), False),
        ((16, 1, 128), False),
    ],
)
def test_which_heads_kernels_take(heads, taken):
    assert fuses_rope_of_heads(*heads) is taken


def test_angles_of_another_type_are_left_alone(any_heads, traced, monkeypatch):
    fused = FuseRopeCache.__call__

    def with_other_angles(self, gm):
        result = fused(self, gm)
        for node in gm.graph.nodes:
            if node.target is torch.ops.mllm.rope_and_cache.default:
                node.args[3].meta["val"] = node.args[3].meta["val"].double()
        return result

    monkeypatch.setattr(FuseRopeCache, "__call__", with_other_angles)
    assert rewritten(traced).matches == 0


def test_a_served_model_says_what_transformers_says(any_heads, rotating, tmp_path):
    changes = {"compile": {"backend": "eager"}, "runtime": {"max_num_batched_tokens": 16}}  # prompts come in chunks
    reference = Reference()
    prompts = [reference.encode(text) for text in ("The for statement is used to iterate over " * 4, "Return", "x")]
    with Engine(tiny_config(tmp_path, **changes)) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == reference.greedy(prompt, 40)
    assert max(rotating) == len(prompts)


def test_heads_that_do_not_rotate_are_written_by_attention_too(any_heads, rotating, tmp_path):
    model = save_encoder_decoder("bart", tmp_path / "model")
    config = {
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 64},
        "cache": {"dir": str(tmp_path / "cache")},
    }
    program = load_or_compile(EngineConfig.from_dict(config)).artifact.program
    told = [step.rope_inputs.values for step in program.steps if isinstance(step, AttentionStep)]
    assert told
    assert all(len(values) == 2 for values in told), "q and k alone"
    sources = sources_of_ids(7, 20, 1)
    with Engine(config) as engine:
        outputs = engine.generate(sources, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for source, output in zip(sources, outputs, strict=True):
        assert output.token_ids == greedy(model, source, output.decoder_prompt_token_ids or [], 12)
    assert max(rotating) == len(sources)


def test_without_such_attention_the_op_rotates(any_heads, tmp_path):
    reference = Reference()
    prompt = reference.encode("Return")
    with Engine(tiny_config(tmp_path, compile={"backend": "eager"})) as engine:
        (output,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=10))
    assert list(output.token_ids) == reference.greedy(prompt, 10)
