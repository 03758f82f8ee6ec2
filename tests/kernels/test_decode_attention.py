"""Layers that decode by a piece of the program, and their pieces."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from mllm_compile.kernels import decode_attention
from mllm_compile.kernels.decode_attention import add_decode_attention
from mllm_compile.runtime.attention.hopper.clusters import cluster_kernels
from mllm_compile.runtime.attention.hopper.shares import MOST_REQUESTS, ShareKernel
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import DecodeVariant, of_kind
from mllm_compile.runtime.attention.split.splits import IN_ORDER, OF_FEW, OF_MANY, OF_ONE
from mllm_compile.runtime.program.spec import Program
from tests.config.resolving import A100, CPU, H200, resolved

LAYER = LayerSpec("layers.0.attn", 0, 32, 8, 128, 128, 0.088, 0.0, -1, None)
WINDOWED = replace(LAYER, name="layers.1.attn", layer_id=1, window_left=511)


@pytest.fixture(autouse=True)
def has_kernels(monkeypatch) -> Callable[[bool], None]:
    """False: CUDA kernels cannot be compiled for the GPU."""

    def answer(can_compile: bool) -> None:
        monkeypatch.setattr(decode_attention, "can_compile_kernels", lambda device: can_compile)

    answer(False)
    return answer


def piece_variants(index: int) -> tuple[DecodeVariant, ...]:
    return DecodeVariant(64, f"decode_{index}_few", OF_FEW), DecodeVariant(None, f"decode_{index}_many", OF_MANY)


def program(*layers: LayerSpec) -> Program:
    return Program(steps=(), layers=layers, weights=(), output="logits")


def test_layers_that_are_alike_share_two_pieces():
    same = replace(LAYER, name="layers.2.attn", layer_id=2)
    with_variants, pieces = add_decode_attention(resolved(H200), program(LAYER, WINDOWED, same))
    assert of_kind(with_variants.layer_kernels, "decode") == {
        LAYER.name: piece_variants(0),
        WINDOWED.name: piece_variants(1),
        same.name: piece_variants(0),
    }
    assert [piece.name for piece in pieces] == with_variants.piece_ids()
    assert all(ast.parse(piece.source) for piece in pieces)
    assert "window_left=511" in pieces[2].source
    assert "window_left=-1" in pieces[0].source


def test_on_hopper_kernels_stand_for_both_pieces(has_kernels):
    has_kernels(True)
    config = resolved(H200, runtime={"max_model_len": 4096})
    with_variants, pieces = add_decode_attention(config, program(LAYER, WINDOWED))
    page_size = config.runtime.page_size
    clusters, shares = cluster_kernels(32, 8, page_size), ShareKernel(8, 4, page_size)
    assert of_kind(with_variants.layer_kernels, "decode") == {
        LAYER.name: (DecodeVariant(256, kernels=clusters), DecodeVariant(None, kernels=(shares,))),
        WINDOWED.name: piece_variants(1),
    }
    assert [piece.name for piece in pieces] == ["decode_1_few", "decode_1_many"]
    assert with_variants.cuda_kernels() == (*clusters, shares)
    assert Program.from_json(json.loads(json.dumps(with_variants.to_json()))) == with_variants


@pytest.mark.parametrize(
    ("kv_heads", "sizes", "served"),
    [
        (8, {}, [("clusters", 256), ("shares", None)]),
        (8, {"max_model_len": 32768}, [("clusters", 64), ("shares", None)]),
        (16, {"max_model_len": 32768}, [("clusters", 64), ("shares", None)]),
        (8, {"max_running_requests": 2000}, [("clusters", 256), ("shares", 8192), ("decode_0_many", None)]),
        (4, {"max_model_len": 32768}, [("clusters", 64), ("shares", None)]),
        (10, {}, [("clusters", 128), ("shares", None)]),
        (72, {"max_model_len": 32768}, [("shares", None)]),
        (4, {}, [("clusters", 128), ("shares", None)]),
        (2, {}, [("clusters", 128), ("shares", None)]),
        (1, {"max_running_requests": 2000}, [("clusters", 128), ("shares", 1024), ("decode_0_many", None)]),
    ],
    ids=[
        "short",
        "long",
        "many heads",
        "very many requests",
        "half as many heads",
        "heads that do not divide into eights",
        "no batch for clusters",
        "smaller blocks of shares",
        "two heads",
        "one head",
    ],
)
def test_pieces_keep_what_the_kernels_are_slower_at_or_do_not_serve(has_kernels, kv_heads, sizes, served):
    has_kernels(True)
    layer = replace(LAYER, num_heads=4 * kv_heads, num_kv_heads=kv_heads)
    config = resolved(H200, runtime={"max_model_len": 4096, "max_num_batched_tokens": 8192} | sizes)
    with_variants, pieces = add_decode_attention(config, program(layer))
    variants = of_kind(with_variants.layer_kernels, "decode")[layer.name]
    names = [variant.piece or variant.kernels[0].name.partition("_")[0] for variant in variants]
    assert list(zip(names, [variant.most_sequences for variant in variants], strict=True)) == served
    assert [piece.name for piece in pieces] == [name for name in names if name.startswith("decode")]


def test_a_prompt_may_have_more_rows_of_attention_to_its_source_than_shares_count(has_kernels):
    has_kernels(True)
    cross = replace(LAYER, name="layers.0.encoder_attn")
    of_both, _ = add_decode_attention(resolved(H200), replace(program(LAYER), cross_layers=(cross,)))
    for name, variants in of_kind(of_both.layer_kernels, "decode").items():
        assert [variant.most_sequences for variant in variants[1:]] == [MOST_REQUESTS * LAYER.num_kv_heads, None]
        assert {kernel.of_source for kernel in variants[0].kernels} == {name == cross.name}, "none of its keys is new"


def test_two_heads_of_64_are_taken_as_one_of_128(has_kernels):
    has_kernels(True)
    layer = replace(LAYER, num_heads=20, num_kv_heads=20, head_dim=64, v_head_dim=64)
    config = resolved(H200, runtime={"max_model_len": 448, "max_running_requests": 32})
    with_variants, pieces = add_decode_attention(config, program(layer))
    clusters = cluster_kernels(20, 10, config.runtime.page_size, together=2)
    shares = ShareKernel(10, 2, config.runtime.page_size, together=2)
    variants = of_kind(with_variants.layer_kernels, "decode")[layer.name]
    assert variants == (DecodeVariant(2 * 128, kernels=clusters), DecodeVariant(None, kernels=(shares,))) and not pieces
    assert all(variant.fuses_rope for variant in variants)
    assert Program.from_json(json.loads(json.dumps(with_variants.to_json()))) == with_variants


@pytest.mark.parametrize("kv_heads", [1, 4, 16])
def test_wide_heads_are_shared_out_except_for_few_requests(has_kernels, kv_heads):
    has_kernels(True)
    layer = replace(LAYER, num_heads=4 * kv_heads, num_kv_heads=kv_heads, head_dim=256, v_head_dim=256)
    config = resolved(H200, runtime={"kv_cache_dtype": "fp8_e4m3"})
    with_variants, (few,) = add_decode_attention(config, program(layer))
    shares = ShareKernel(kv_heads, 4, config.runtime.page_size, fp8=True, head_dim=256)
    assert of_kind(with_variants.layer_kernels, "decode")[layer.name] == (
        DecodeVariant(64, few.name, OF_FEW),
        DecodeVariant(None, kernels=(shares,)),
    )
    assert Program.from_json(json.loads(json.dumps(with_variants.to_json()))) == with_variants


@pytest.mark.parametrize(("kv_heads", "splits"), [(8, [2, 4, 8]), (16, [2, 4, 8]), (24, [2, 4])])
def test_clusters_are_compiled_for_splits_that_a_batch_can_have(has_kernels, kv_heads, splits):
    has_kernels(True)
    layer = replace(LAYER, num_heads=kv_heads, num_kv_heads=kv_heads)
    with_variants, _ = add_decode_attention(resolved(H200, runtime={"max_model_len": 4096}), program(layer))
    assert [kernel.split for kernel in of_kind(with_variants.layer_kernels, "decode")[layer.name][0].kernels] == splits


@pytest.mark.parametrize(
    ("kv_heads", "group", "drafted", "requests", "found"),
    [
        (8, 4, 3, 64, [(4, 512, [2, 4, 8])]),
        (8, 4, 3, 2, [(4, 16, [8])]),
        (8, 4, "auto", 256, [(tokens, 2048 // tokens, [2, 4, 8]) for tokens in (2, 4, 8, 16)]),
        (4, 8, "auto", 64, [(2, 256, [2, 4, 8]), (4, 256, [2, 4, 8]), (8, 128, [2, 4, 8])]),
        (8, 8, 8, 64, []),
    ],
    ids=["fixed", "few requests", "auto", "auto without the longest", "more queries than warps have sums of"],
)
def test_verify_steps_have_clusters_for_each_number_of_tokens(has_kernels, kv_heads, group, drafted, requests, found):
    has_kernels(True)
    layer = replace(LAYER, num_heads=group * kv_heads, num_kv_heads=kv_heads)
    speculative = {"method": "ngram", "num_speculative_tokens": drafted}
    config = resolved(H200, speculative=speculative, runtime={"max_running_requests": requests})
    with_variants, _ = add_decode_attention(config, program(layer))
    variants = with_variants.layer_kernels[layer.name].verify
    assert [
        (variant.tokens, variant.most_sequences, [kernel.split for kernel in variant.kernels]) for variant in variants
    ] == found
    assert {kernel for variant in variants for kernel in variant.kernels} <= set(with_variants.cuda_kernels())
    assert Program.from_json(json.loads(json.dumps(with_variants.to_json()))) == with_variants


def test_over_keys_of_e4m3_half_as_many_queries_are_taken_together(has_kernels):
    has_kernels(True)
    config = resolved(H200, speculative={"method": "ngram"}, runtime={"kv_cache_dtype": "fp8_e4m3"})
    with_variants, _ = add_decode_attention(config, program(LAYER))
    variants = with_variants.layer_kernels[LAYER.name].verify
    assert [variant.tokens for variant in variants] == [2, 4, 8]
    assert all(kernel.fp8 for variant in variants for kernel in variant.kernels)


@pytest.mark.parametrize(
    "sections",
    [
        {"runtime": {"without": ["hopper_decode"]}},
        {"speculative": {"method": "none"}},
    ],
    ids=["switched off", "no drafts"],
)
def test_else_tokens_of_verify_steps_are_decodes(has_kernels, sections):
    has_kernels(True)
    config = resolved(H200, **{"speculative": {"method": "ngram", "num_speculative_tokens": 3}, **sections})
    with_variants, _ = add_decode_attention(config, program(LAYER))
    assert not with_variants.layer_kernels[LAYER.name].verify


@pytest.mark.parametrize(
    ("layer", "sections"),
    [
        (replace(LAYER, num_heads=128), {}),
        (replace(LAYER, head_dim=64, v_head_dim=64, num_heads=64), {}),
        (replace(LAYER, head_dim=64, v_head_dim=64, num_heads=15, num_kv_heads=5), {}),
        (replace(LAYER, logits_soft_cap=30.0), {}),
        (LAYER, {"runtime": {"without": ["hopper_decode"]}}),
        (LAYER, {"runtime": {"deterministic": True}}),
        (LAYER, {"model": {"path": "m", "dtype": "float16"}}),
        (LAYER, {"runtime": {"page_size": 8}}),
    ],
    ids=["group", "group of two", "odd heads", "soft cap", "switched off", "deterministic", "dtype", "pages"],
)
def test_what_the_kernels_do_not_serve_keeps_its_pieces(has_kernels, layer, sections):
    has_kernels(True)
    with_variants, _ = add_decode_attention(resolved(H200, **sections), program(layer))
    (variants,) = of_kind(with_variants.layer_kernels, "decode").values()
    assert all(variant.piece is not None and not variant.kernels for variant in variants)


def test_layers_share_pieces_or_kernels_that_are_given_each_its_sinks(has_kernels):
    sinks = [replace(LAYER, name=f"layers.{i}", layer_id=i, sinks=f"layers.{i}.sinks") for i in (1, 2)]
    with_variants, pieces = add_decode_attention(resolved(H200), program(LAYER, *sinks))
    assert of_kind(with_variants.layer_kernels, "decode") == {
        LAYER.name: piece_variants(0),
        sinks[0].name: piece_variants(1),
        sinks[1].name: piece_variants(1),
    }
    assert [("sinks" in piece.signature, "sinks=None" in piece.source) for piece in pieces] == [(False, True)] * 2 + [
        (True, False)
    ] * 2
    assert pieces[2].signature["sinks"].shape == (32,)
    has_kernels(True)
    with_variants, pieces = add_decode_attention(
        resolved(H200, runtime={"max_model_len": 4096}), program(LAYER, *sinks)
    )
    assert not pieces
    assert (
        of_kind(with_variants.layer_kernels, "decode")[sinks[0].name]
        == of_kind(with_variants.layer_kernels, "decode")[sinks[1].name]
    )
    assert [kernel.sinks for kernel in with_variants.cuda_kernels()] == [False] * 4 + [True] * 4
    assert len({kernel.name for kernel in with_variants.cuda_kernels()}) == 8
    assert Program.from_json(json.loads(json.dumps(with_variants.to_json()))) == with_variants


def test_inputs_are_contiguous_with_sizes_by_name():
    _, (few, _) = add_decode_attention(resolved(H200), program(LAYER))
    q, keys, _, table, *_, partial, tops, _, done = few.inputs
    assert (q.shape, q.stride, q.dtype) == (("T", 32, 128), (4096, 128, 1), "bfloat16")
    assert (keys.shape, keys.stride) == (("P", 8, 128), (1024, 128, 1))
    assert (table.shape, table.stride, table.dtype) == (("T", "W"), ("W", 1), "int32")
    assert (partial.shape, partial.stride, partial.dtype) == (
        ("T", "N", 32, 128),
        ("N*4096", 4096, 128, 1),
        "float32",
    )
    assert (tops.shape, tops.stride) == (("T", "N", 32), ("N*32", 32, 1))
    assert done.shape == ("T", 8)


def test_in_deterministic_mode_one_piece_fetches_no_key_before_the_step_has_written_it():
    config = resolved(H200, runtime={"deterministic": True, "without": ["any_rows"]})
    with_variants, (only,) = add_decode_attention(config, program(LAYER))
    assert of_kind(with_variants.layer_kernels, "decode") == {
        LAYER.name: (DecodeVariant(None, "decode_0_many", OF_MANY),)
    }
    assert "fetch_first=False" in only.source
    _, (few, _) = add_decode_attention(resolved(H200), program(LAYER))
    assert "fetch_first=True" in few.source


def test_steps_of_any_number_of_rows_have_a_second_piece_for_rows_of_one_request():
    config = resolved(H200, runtime={"deterministic": True})
    sunk = replace(LAYER, name="layers.2.attn", sinks="sinks", alibi_slopes=(0.5,) * 32)
    with_variants, pieces = add_decode_attention(config, program(LAYER, WINDOWED, sunk))

    def alone(index: int) -> list[DecodeVariant]:
        sizes = {32: 16, 64: 8, 128: 4, 2048: 1}
        return [DecodeVariant(most, f"decode_{index}_by_{blocks}", IN_ORDER) for most, blocks in sizes.items()]

    assert of_kind(with_variants.layer_kernels, "decode") == {
        LAYER.name: (*alone(0), DecodeVariant(None, "decode_0_rows")),
        WINDOWED.name: (DecodeVariant(None, "decode_1_many", OF_ONE),),
        sunk.name: (*alone(2), DecodeVariant(None, "decode_2_rows")),
    }
    rows = {piece.name: piece for piece in pieces}
    assert list(rows["decode_0_rows"].signature) == ["q", "keys", "values", "page_table", "seq_lens", "out"]
    assert list(rows["decode_2_rows"].signature)[5:] == ["out", "sinks", "slopes"]
    blocks = {name: piece.source for name, piece in rows.items() if "_by_" in name}
    assert all(f"blocks={name.rpartition('_')[2]}" in source for name, source in blocks.items()) and len(blocks) == 8
    assert "sinks=None" in rows["decode_0_rows"].source and "sinks=sinks" in rows["decode_2_rows"].source


@pytest.mark.parametrize(
    ("device", "sections"),
    [
        (CPU, {}),
        (H200, {"compile": {"backend": "eager"}}),
        (H200, {"runtime": {"without": ["split_decode"]}}),
        (A100, {"runtime": {"kv_cache_dtype": "fp8_e4m3"}}),
        (H200, {"runtime": {"attention_backend": "torch"}, "cudagraph": {"mode": "none"}}),
    ],
    ids=["cpu", "eager", "switched off", "fp8", "torch"],
)
def test_otherwise_flashinfer_decodes_or_plain_torch(device, sections):
    assert add_decode_attention(resolved(device, **sections), program(LAYER)) == (program(LAYER), ())


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 96, "v_head_dim": 96},
        {"v_head_dim": 64},
        {"num_heads": 17, "num_kv_heads": 1},
        {"chunk": 8192, "window_left": 9},
    ],
    ids=["head dim", "other values", "too many query heads", "chunks in a window"],
)
def test_a_layer_that_the_kernel_does_not_serve_is_left_to_the_backend(change):
    odd = replace(LAYER, name="odd", **change)
    with_variants, pieces = add_decode_attention(resolved(H200), program(LAYER, odd))
    assert set(of_kind(with_variants.layer_kernels, "decode")) == {LAYER.name}
    assert len(pieces) == 2


def test_kernels_and_pieces_over_a_cache_of_fp8_read_it(monkeypatch):
    monkeypatch.setattr(decode_attention, "can_compile_kernels", lambda device: True)
    config = resolved(H200, runtime={"kv_cache_dtype": "fp8_e4m3"})
    served, _ = add_decode_attention(config, program(LAYER))
    variants = of_kind(served.layer_kernels, "decode")[LAYER.name]
    kernels = [kernel for variant in variants for kernel in variant.kernels]
    assert kernels and all(kernel.fp8 and kernel.name.count("_fp8") == 1 for kernel in kernels)
    monkeypatch.setattr(decode_attention, "can_compile_kernels", lambda device: False)
    _, pieces = add_decode_attention(config, program(LAYER))
    assert {piece.signature[name].dtype for piece in pieces for name in ("keys", "values")} == {"float8_e4m3fn"}
    assert {piece.signature[name].dtype for piece in pieces for name in ("q", "out")} == {"bfloat16"}
