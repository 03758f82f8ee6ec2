"""Layers whose prompts and decodes run by pieces of the program, as FlashInfer has no kernel for them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mllm_compile.kernels import decode_attention
from mllm_compile.kernels.decode_attention import add_decode_attention
from mllm_compile.kernels.piece import WrittenPiece
from mllm_compile.kernels.prefill_attention import add_prefill_attention
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.runtime.program.spec import Program
from tests.config.resolving import CPU, H200, resolved

PLAIN = LayerSpec("layers.0.attn", 0, 32, 8, 128, 128, 0.1, 0.0, -1, None)
CHUNKED = replace(PLAIN, name="layers.1.attn", layer_id=1, chunk=8192)
BIASED = replace(PLAIN, name="layers.2.attn", layer_id=2, alibi_slopes=(0.5,) * 32)


@pytest.fixture(autouse=True)
def no_cuda_compiler(monkeypatch) -> None:
    monkeypatch.setattr(decode_attention, "can_compile_kernels", lambda device: False)


def added(device, sections, *layers: LayerSpec) -> tuple[Program, tuple[WrittenPiece, ...]]:
    config = resolved(device, **sections)
    program, _ = add_decode_attention(config, Program(steps=(), layers=layers, weights=(), output="logits"))
    return add_prefill_attention(config, program)


@pytest.mark.parametrize(
    "sections", [{}, {"compile": {"backend": "eager"}}, {"runtime": {"without": ["split_decode"]}}], ids=str
)
def test_layers_with_a_bias_or_chunks_have_kernels_of_their_own_whatever_the_others_have(sections):
    same = replace(CHUNKED, name="layers.3.attn", layer_id=3)
    program, pieces = added(H200, sections, PLAIN, CHUNKED, BIASED, same)
    assert of_kind(program.layer_kernels, "prefill") == {
        CHUNKED.name: "prefill_0",
        BIASED.name: "prefill_1",
        same.name: "prefill_0",
    }
    assert set(of_kind(program.layer_kernels, "decode")) >= {CHUNKED.name, BIASED.name, same.name}
    assert (PLAIN.name in of_kind(program.layer_kernels, "decode")) == (not sections)
    assert not any(
        variant.kernels
        for layer in (CHUNKED, BIASED)
        for variant in of_kind(program.layer_kernels, "decode")[layer.name]
    )
    assert [("slopes" in piece.signature, "chunk=8192" in piece.source) for piece in pieces] == [
        (False, True),
        (True, False),
    ]
    assert {piece.name for piece in pieces} <= set(program.piece_ids())
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program


def test_their_decodes_pieces_are_given_slopes_and_chunks():
    program = Program(steps=(), layers=(CHUNKED, BIASED), weights=(), output="logits")
    _, pieces = add_decode_attention(resolved(H200), program)
    assert [("slopes" in piece.signature, "chunk=8192" in piece.source) for piece in pieces] == [
        (False, True),
        (False, True),
        (True, False),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("device", "sections", "layer"),
    [
        (CPU, {}, BIASED),
        (H200, {"runtime": {"attention_backend": "torch"}, "cudagraph": {"mode": "none"}}, BIASED),
        (H200, {}, PLAIN),
        (H200, {}, replace(BIASED, window_left=7)),
        (H200, {}, replace(CHUNKED, logits_soft_cap=30.0)),
        (H200, {}, replace(BIASED, num_heads=34, num_kv_heads=2, alibi_slopes=(0.5,) * 34)),
    ],
    ids=["cpu", "torch", "plain", "window", "soft cap", "many query heads"],
)
def test_others_have_none(device, sections, layer):
    program, pieces = added(device, sections, layer)
    assert (of_kind(program.layer_kernels, "prefill"), pieces) == ({}, ())
