"""passes/fuse_rope_cache.py on traced models: what is fused, and that a served model says what it said.

The kernel needs CUDA and Triton; here its op is a stand-in in plain torch (conftest.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.model.hf_model import build_on_meta
from mllm_compile.model.trace import trace_model
from mllm_compile.passes.base import ATTENTION_LAYERS
from mllm_compile.passes.canonicalise import Canonicalise
from mllm_compile.passes.fuse_rope_cache import FuseRopeCache
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.match.nodes import is_attention_with_output
from mllm_compile.passes.pack_projections import PackProjections
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import AttentionStep, PieceStep
from tests.model.encoder_decoders import save_encoder_decoder, save_word_tokenizer
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of
from tests.sample import slow_but_a_sample
from tests.tiny_model import Reference, tiny_config


def compiled_program(folder: Path, model_type: str, **changes: object) -> Program:
    save_tiny_model(shape_of(model_type, **changes), folder / "model")
    return program_of(folder)


def program_of(folder: Path) -> Program:
    config = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 64},
        "cache": {"dir": str(folder / "cache")},
    }
    return load_or_compile(EngineConfig.from_dict(config)).artifact.program


def layers_fused(program: Program) -> list[str]:
    return [step.writes_kv_of for step in program.steps if isinstance(step, PieceStep) and step.writes_kv_of]


# Heads are normed ahead of their transposition, or behind it by 1 + the weight, or not; of phi's a part is rotated, of
# gpt2's and nemotron_h's none; gpt_oss has angles of half a head.
KINDS = ["qwen3", "gemma3_text", "phi", "gpt2", "nemotron_h", "gpt_oss"]


@pytest.mark.parametrize("model_type", slow_but_a_sample(KINDS, 2))
def test_every_layer_writes_its_cache_in_the_piece_before_attention(rope_on_cpu, tmp_path, model_type):
    program = compiled_program(tmp_path, model_type)  # its self-check compares the logits with Transformers'
    attentions = [step for step in program.steps if isinstance(step, AttentionStep)]
    assert layers_fused(program) == [step.layer for step in attentions] != []
    assert not any(step.saves_kv for step in attentions)
    assert Program.from_json(program.to_json()) == program


def test_a_bias_by_distance_stays(rope_on_cpu, tmp_path):
    save_encoder_decoder("t5", tmp_path / "model")
    save_word_tokenizer(tmp_path / "model")
    program = program_of(tmp_path)  # its self-check compares the logits with Transformers'
    attentions = [step for step in program.steps if isinstance(step, AttentionStep)]
    assert layers_fused(program) == [step.layer for step in attentions] != []
    assert all(step.bias is not None and not step.saves_kv for step in attentions)


@pytest.mark.parametrize("model_type", ["cohere"])  # whose neighbours are rotated
def test_other_rotations_are_left_alone(rope_on_cpu, tmp_path, model_type):
    program = compiled_program(tmp_path, model_type)
    assert layers_fused(program) == []
    assert all(step.saves_kv for step in program.steps if isinstance(step, AttentionStep))


def test_a_served_model_says_what_transformers_says(rope_on_cpu, tmp_path):
    changes = {"compile": {"backend": "eager"}, "runtime": {"max_num_batched_tokens": 16}}  # prompts come in chunks
    reference = Reference()
    prompts = [reference.encode(text) for text in ("The for statement is used to iterate over " * 4, "Return", "x")]
    with Engine(tiny_config(tmp_path, **changes)) as engine:
        for time in range(2):  # the second time from the prefix cache
            outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
            assert (outputs[0].num_cached_tokens > 0) == (time == 1)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert list(output.token_ids) == reference.greedy(prompt, 40)


def test_without_the_pass_the_runtime_writes_the_cache(tmp_path):
    program = compiled_program(tmp_path, "qwen3")
    assert layers_fused(program) == []


def test_a_query_that_somebody_reads_before_the_values_are_there_is_left_alone(rope_on_cpu, tmp_path):
    config = tiny_config(tmp_path)
    trace = trace_model(build_on_meta(Path(config.model.path), torch.float32, False), "cpu", 8192)
    gm = trace.graph_module
    for graph_pass in (Canonicalise(), PackProjections(), LowerAttention()):
        gm = graph_pass(gm).gm
    attention = next(node for node in gm.graph.nodes if is_attention_with_output(node))
    q = attention.args[0]
    with gm.graph.inserting_after(q):
        early = gm.graph.call_function(torch.relu, (q,))
    early.meta["val"] = q.meta["val"]
    output = next(node for node in gm.graph.nodes if node.op == "output")
    output.args = ((*output.args[0], early),)
    layers = len(gm.meta[ATTENTION_LAYERS])
    assert FuseRopeCache()(gm).matches == layers - 1
    gm.graph.lint()
