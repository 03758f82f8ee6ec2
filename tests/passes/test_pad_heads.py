"""pad_heads: heads of other widths than the kernels' get zeros, and a model that is served so gives the same tokens."""

from __future__ import annotations

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.passes.base import PassTarget
from mllm_compile.passes.pad_heads import PadHeads
from mllm_compile.passes.pipeline import passes_left_out
from mllm_compile.runtime.attention.flashinfer.kernels import check_supported
from mllm_compile.runtime.attention.layer import AttentionLayer
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config
from tests.passes.support.graph_builder import GraphBuilder, apply, run, targets, text
from tests.sample import slow_but_a_sample

TOKENS = 6


def one_attention(width: int, v_width: int | None = None, **said) -> torch.fx.GraphModule:
    """Attention of 4 query heads and 2 KV heads of this width, as canonicalise leaves it."""
    builder = GraphBuilder()
    x, tokens = builder.embed(), builder.size_inputs["T"]
    v_width = v_width or width
    operands = []
    for name, heads, size in (("q", 4, width), ("k", 2, width), ("v", 2, v_width)):
        operands.append(builder.method("view", builder.linear(x, name, heads * size), tokens, heads, size))
    arguments = {"sinks": None, "sm_scale": 0.3, "logits_soft_cap": 0.0, "window_left": -1, "refusals": ""} | said
    out = builder.call(torch.ops.mllm.attention.default, *operands, *arguments.values())
    out.meta["nn_module_stack"] = {"m": ("L['self'].model.layers.0.attn", torch.nn.Module)}
    return builder.canonical(builder.head(builder.method("flatten", out, 1)))


def attention_of(gm: torch.fx.GraphModule) -> torch.fx.Node:
    return next(node for node in gm.graph.nodes if "mllm.attention" in str(node.target))


def widths_of(gm: torch.fx.GraphModule) -> list[int]:
    return [operand.meta["val"].shape[-1] for operand in attention_of(gm).args[:3]]


@pytest.mark.parametrize(
    ("width", "v_width", "padded"),
    [(16, 16, 64), (72, 72, 128), (80, 80, 128), (96, 96, 128), (112, 112, 128), (192, 128, 256), (128, 64, 128)],
)
def test_heads_get_the_next_width_of_the_kernels_and_the_same_output(width, v_width, padded):
    gm = one_attention(width, v_width)
    before = run(gm)
    result = PadHeads()(gm)
    gm.recompile()
    assert result.matches == 1
    assert widths_of(gm) == [padded] * 3
    assert attention_of(gm).args[4] == 0.3
    torch.testing.assert_close(run(gm), before, rtol=1e-6, atol=1e-6)
    assert PadHeads()(gm).matches == 0


def test_a_view_that_joins_heads_is_a_reshape_of_their_parts():
    """JetMoE takes the heads of each of a token's experts together."""
    builder = GraphBuilder()
    x, tokens = builder.embed(), builder.size_inputs["T"]
    operands = [builder.method("view", builder.linear(x, name, 4 * 16), tokens, 4, 16) for name in "qkv"]
    out = builder.call(torch.ops.mllm.attention.default, *operands, None, 0.3, 0.0, -1, "")
    out.meta["nn_module_stack"] = {"m": ("L['self'].model.layers.0.attn", torch.nn.Module)}
    joined = builder.method("view", builder.call(torch.unsqueeze, out, 0), 1, tokens, 2, -1)
    gm = builder.canonical(builder.head(builder.call(torch.reshape, joined, (tokens, 64))))
    before = run(gm)
    gm = apply(PadHeads(), gm)
    torch.testing.assert_close(run(gm), before, rtol=1e-6, atol=1e-6)


def test_windows_caps_and_sinks_stay_with_the_call_and_the_module_keeps_its_name():
    gm = apply(PadHeads(), one_attention(80, window_left=3, logits_soft_cap=9.0))
    node = attention_of(gm)
    assert node.args[3:] == (None, 0.3, 9.0, 3, "")
    assert "layers.0.attn" in str(node.meta["nn_module_stack"])


@pytest.mark.parametrize("width", [64, 128, 256, 320])
def test_the_kernels_own_widths_and_wider_heads_are_left_alone(width):
    gm = one_attention(width)
    before = text(gm)
    assert PadHeads()(gm).matches == 0
    assert text(gm) == before
    assert "constant_pad_nd.default" not in targets(gm)


def test_it_is_left_out_where_torch_attends():
    on_gpu = PassTarget("cuda", True, True, True, "bfloat16", "bfloat16", attention_backend="flashinfer")
    assert "pad_heads" not in passes_left_out(on_gpu)
    on_cpu = PassTarget("cpu", True, False, False, "float32", "float32")
    assert passes_left_out(on_cpu)["pad_heads"] == "runtime.attention_backend torch takes heads of any width"


@pytest.fixture
def padding_everywhere(monkeypatch):
    monkeypatch.setattr(PadHeads, "obstacle", classmethod(lambda cls, target: None))


# phi: a part of each head is rotated; phi3: windows; deepseek_v3: values narrower than keys; gpt_oss: sinks; jetmoe:
# heads that are taken together by a view.
ARCHITECTURES = ("phi", "phi3", "deepseek_v3", "gpt_oss", "jetmoe")


@pytest.mark.parametrize("architecture", slow_but_a_sample(ARCHITECTURES, 1))
def test_a_model_with_padded_heads_gives_the_tokens_that_it_gives_without(architecture, padding_everywhere, tmp_path):
    tokens = {"eos_token_id": None, "bos_token_id": None}
    save_tiny_model(tiny_config(architecture, **tokens), tmp_path / "model")
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, FIRST_SPECIAL_TOKEN, (n,), generator=generator).tolist() for n in (1, 5, 40)]
    outputs = {}
    expanded = ["absorb_latents"]  # latents are not padded
    for name, disabled, skipped in (
        ("padded", expanded, False),
        ("eager", expanded, True),
        ("plain", [*expanded, "pad_heads"], False),
    ):
        config = EngineConfig.from_dict(
            {
                "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
                "compile": {"backend": "eager", "disable_passes": disabled},
                "runtime": {
                    "device": "cpu",
                    "max_model_len": 64,
                    "max_num_batched_tokens": 32,
                    "page_size": 4,
                    "skip_compiled": skipped,
                },
                "cache": {"dir": str(tmp_path / "cache")},
            }
        )
        layers = load_or_compile(config).artifact.program.layers
        assert {layer.head_dim == layer.v_head_dim == 64 for layer in layers} == {name != "plain"}
        if name == "padded":
            check_supported([AttentionLayer.of(one, {one.sinks: None}) for one in layers], torch.bfloat16)
        with Engine(config) as engine:
            found = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))
        outputs[name] = [output.token_ids for output in found]
    assert outputs["padded"] == outputs["plain"] == outputs["eager"]
