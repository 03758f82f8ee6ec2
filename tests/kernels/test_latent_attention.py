"""Layers that attend over latents by pieces of the program."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mllm_compile.kernels.latent_attention import add_latent_attention
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import LatentKernels, of_kind
from mllm_compile.runtime.program.spec import Program
from tests.config.resolving import CPU, H200, resolved

LAYER = LayerSpec("layers.0.attn", 0, 16, 1, 576, 512, 0.07, 0.0, -1, None, is_latent=True)


def program(*layers: LayerSpec) -> Program:
    return Program(steps=(), layers=layers, weights=(), output="logits")


def test_layers_that_are_alike_share_two_pieces_and_the_program_is_read_as_it_was_written():
    same = replace(LAYER, name="layers.1.attn", layer_id=1)
    wider = replace(LAYER, name="layers.2.attn", layer_id=2, sm_scale=0.1)
    with_variants, pieces = add_latent_attention(resolved(H200), program(LAYER, same, wider))
    first, second = (LatentKernels(f"latent_{index}_decode", f"latent_{index}_prefill") for index in (0, 1))
    assert of_kind(with_variants.layer_kernels, "latent") == {LAYER.name: first, same.name: first, wider.name: second}
    names = [f"latent_{index}_{what}" for index in (0, 1) for what in ("decode", "prefill")]
    assert [piece.name for piece in pieces] == names == with_variants.piece_ids()
    assert Program.from_json(json.loads(json.dumps(with_variants.to_json()))) == with_variants
    assert ["sm_scale=0.1" in piece.source for piece in pieces] == [False, False, True, True]


def test_layers_with_their_up_projection_have_a_third_piece_whatever_its_weight_is_called():
    own = {"up_projection": "layers.0.kv_b_proj.weight", "up_key_dim": 128, "up_value_dim": 128}
    layer = replace(LAYER, **own)
    same = replace(layer, name="layers.1.attn", layer_id=1, up_projection="layers.1.kv_b_proj.weight")
    with_variants, pieces = add_latent_attention(resolved(H200), program(layer, same))
    variants = LatentKernels(*(f"latent_0_{what}" for what in ("decode", "prefill", "expanded")))
    assert of_kind(with_variants.layer_kernels, "latent") == {layer.name: variants, same.name: variants}
    names = [variants.decode, variants.prefill, variants.expanded]
    assert [piece.name for piece in pieces] == names == with_variants.piece_ids()
    assert Program.from_json(json.loads(json.dumps(with_variants.to_json()))) == with_variants
    over_latents, expanded = pieces[1].signature, pieces[2].signature
    assert (over_latents["q"].shape, over_latents["out"].shape) == (("T", 16, 576), ("T", 16, 512))
    assert (expanded["q"].shape, expanded["out"].shape) == (("T", 16, 192), ("T", 16, "N", 128))


@pytest.mark.parametrize(
    ("device", "sections"),
    [(CPU, {}), (H200, {"runtime": {"attention_backend": "torch"}, "cudagraph": {"mode": "none"}})],
    ids=["cpu", "torch"],
)
def test_torchs_attention_has_no_kernels(device, sections):
    assert add_latent_attention(resolved(device, **sections), program(LAYER)) == (program(LAYER), ())


def test_other_layers_have_none():
    plain = replace(LAYER, is_latent=False)
    assert add_latent_attention(resolved(H200), program(plain)) == (program(plain), ())
