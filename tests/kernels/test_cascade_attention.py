"""Layers whose decodes of one prefix are pieces of the program."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mllm_compile.kernels import decode_attention
from mllm_compile.kernels.cascade_attention import add_cascade_attention
from mllm_compile.kernels.decode_attention import add_decode_attention
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.runtime.program.spec import Program
from mllm_compile.store.key import _attention
from tests.config.resolving import CPU, H200, resolved

LAYER = LayerSpec("layers.0.attn", 0, 32, 8, 128, 128, 0.1, 0.0, -1, None)
ON = {"runtime": {"cascade_attention": True}}  # 256 requests of the longest texts


@pytest.fixture(autouse=True)
def no_cuda_compiler(monkeypatch) -> None:
    monkeypatch.setattr(decode_attention, "can_compile_kernels", lambda device: False)


def added(device, sections, *layers: LayerSpec, **of_program):
    config = resolved(device, **sections)
    program = Program(steps=(), layers=layers, weights=(), output="logits", **of_program)
    return add_cascade_attention(config, add_decode_attention(config, program)[0])


def test_plain_layers_that_are_alike_share_a_piece():
    same = replace(LAYER, name="layers.1.attn", layer_id=1)
    windowed = replace(LAYER, name="layers.2.attn", layer_id=2, window_left=99)
    program, (piece,) = added(H200, ON, LAYER, same, windowed)
    assert of_kind(program.layer_kernels, "cascade") == {LAYER.name: "cascade_0", same.name: "cascade_0"}
    assert piece.name == "cascade_0" and "cascade_0" in program.piece_ids()
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program


def test_configs_that_share_a_runtime_have_the_same_pieces():
    """Whichever was compiled first: of a runtime without the piece later ones could not capture what pays for them."""
    few, many = ({"runtime": {"max_running_requests": count, "max_model_len": 256}} for count in (2, 256))
    assert _attention(resolved(H200, **few)) == _attention(resolved(H200, **many))
    assert added(H200, few, LAYER)[1] == added(H200, many, LAYER)[1] != ()


@pytest.mark.parametrize(
    ("device", "sections", "change"),
    [
        (H200, {"runtime": {"cascade_attention": False}}, {}),
        (CPU, {}, {}),
        (H200, {"compile": {"backend": "eager"}}, {}),
        (H200, {"runtime": {"kv_cache_dtype": "fp8_e4m3"}}, {}),
        (H200, {"runtime": {"max_running_requests": 1}}, {}),
        (H200, ON, {"logits_soft_cap": 30.0}),
        (H200, ON, {"sinks": "layers.0.sinks"}),
        (H200, ON, {"alibi_slopes": (0.5,) * 32}),
    ],
    ids=["off", "cpu", "eager", "fp8 cache", "one request", "soft cap", "sinks", "ALiBi"],
)
def test_others_have_none(device, sections, change):
    program, pieces = added(device, sections, replace(LAYER, **change))
    assert (of_kind(program.layer_kernels, "cascade"), pieces) == ({}, ())


def test_a_program_with_states_has_none():
    program, pieces = added(H200, ON, LAYER, state_layers=("recurrence",))
    assert (of_kind(program.layer_kernels, "cascade"), pieces) == ({}, ())
