"""Which layers decode by a piece of the program, and what those pieces are."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from mllm_compile import decode_attention
from mllm_compile.decode_attention import add_decode_attention
from mllm_compile.runtime.cluster_decode.shapes import cluster_kernels
from mllm_compile.runtime.program import DecodeForms, LayerSpec, Program
from tests.test_resolve import CPU, H200, resolved

LAYER = LayerSpec("layers.0.attn", 0, 32, 8, 128, 128, 0.088, 0.0, -1, None)
WINDOWED = replace(LAYER, name="layers.1.attn", layer_id=1, window_left=511)


@pytest.fixture(autouse=True)
def has_clusters(monkeypatch) -> Callable[[bool], None]:
    """Says whether the GPU is one of clusters for which kernels can be compiled here; it is not."""

    def answer(can_compile: bool) -> None:
        monkeypatch.setattr(decode_attention, "can_compile_kernels", lambda device: can_compile)

    answer(False)
    return answer


def program(*layers: LayerSpec) -> Program:
    return Program(steps=(), layers=layers, weights=(), output="logits")


def test_layers_that_are_alike_share_two_pieces():
    same = replace(LAYER, name="layers.2.attn", layer_id=2)
    with_forms, pieces = add_decode_attention(resolved(H200), program(LAYER, WINDOWED, same))
    assert with_forms.decode_attention == {
        LAYER.name: DecodeForms("decode_0_few", "decode_0_many"),
        WINDOWED.name: DecodeForms("decode_1_few", "decode_1_many"),
        same.name: DecodeForms("decode_0_few", "decode_0_many"),
    }
    assert [piece.name for piece in pieces] == with_forms.piece_ids()
    assert all(ast.parse(piece.source) for piece in pieces)
    assert "window_left=511" in pieces[2].source
    assert "window_left=-1" in pieces[0].source


def test_where_there_are_clusters_their_kernels_stand_for_the_piece_for_few(has_clusters):
    has_clusters(True)
    config = resolved(H200, runtime={"max_model_len": 4096})
    narrow = replace(LAYER, num_heads=16)
    with_forms, pieces = add_decode_attention(config, program(narrow, WINDOWED))
    page_size = config.runtime.page_size
    assert with_forms.decode_attention == {
        LAYER.name: DecodeForms(None, "decode_0_many", cluster_kernels(16, 8, page_size)),
        WINDOWED.name: DecodeForms("decode_1_few", "decode_1_many"),
    }
    assert [piece.name for piece in pieces] == ["decode_0_many", "decode_1_few", "decode_1_many"]
    assert with_forms.cuda_kernels() == cluster_kernels(16, 8, page_size)
    assert Program.from_json(json.loads(json.dumps(with_forms.to_json()))) == with_forms


@pytest.mark.parametrize(
    ("heads", "kv_heads", "max_model_len", "has_few"),
    [(16, 8, 4096, False), (16, 8, 32768, True), (32, 8, 4096, True), (16, 16, 32768, False), (32, 16, 32768, False)],
)
def test_a_request_alone_keeps_its_piece_where_clusters_have_too_few_blocks_for_it(
    has_clusters, heads, kv_heads, max_model_len, has_few
):
    has_clusters(True)
    layer = replace(LAYER, num_heads=heads, num_kv_heads=kv_heads)
    config = resolved(H200, runtime={"max_model_len": max_model_len})
    forms = add_decode_attention(config, program(layer))[0].decode_attention[layer.name]
    assert forms.clusters
    assert (forms.few is not None) is has_few


@pytest.mark.parametrize(
    ("layer", "sections"),
    [
        (replace(LAYER, num_kv_heads=4), {}),
        (replace(LAYER, num_heads=128), {}),
        (replace(LAYER, head_dim=64, v_head_dim=64), {}),
        (replace(LAYER, logits_soft_cap=30.0), {}),
        (LAYER, {"compile": {"cluster_decode": False}}),
        (LAYER, {"runtime": {"deterministic": True}}),
        (LAYER, {"model": {"path": "m", "dtype": "float16"}}),
        (LAYER, {"runtime": {"page_size": 8}}),
    ],
    ids=["kv heads", "group", "head dim", "soft cap", "switched off", "deterministic", "dtype", "pages"],
)
def test_what_clusters_do_not_serve_keeps_its_pieces(has_clusters, layer, sections):
    has_clusters(True)
    with_forms, _ = add_decode_attention(resolved(H200, **sections), program(layer))
    (forms,) = with_forms.decode_attention.values()
    assert forms.few is not None
    assert forms.clusters == ()


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
    config = resolved(H200, runtime={"deterministic": True})
    with_forms, (only,) = add_decode_attention(config, program(LAYER))
    assert with_forms.decode_attention == {LAYER.name: DecodeForms("decode_0_many", "decode_0_many")}
    assert "fetch_first=False" in only.source
    _, (few, _) = add_decode_attention(resolved(H200), program(LAYER))
    assert "fetch_first=True" in few.source


@pytest.mark.parametrize(
    ("device", "sections"),
    [
        (CPU, {}),
        (H200, {"compile": {"backend": "eager"}}),
        (H200, {"compile": {"split_decode": False}}),
        (H200, {"runtime": {"kv_cache_dtype": "fp8_e4m3"}}),
        (H200, {"runtime": {"attention_backend": "torch"}, "cudagraph": {"mode": "none"}}),
    ],
    ids=["cpu", "eager", "switched off", "fp8", "torch"],
)
def test_otherwise_flashinfer_decodes_or_plain_torch(device, sections):
    assert add_decode_attention(resolved(device, **sections), program(LAYER)) == (program(LAYER), ())


@pytest.mark.parametrize(
    "change",
    [
        {"sinks": "layers.0.sinks"},
        {"head_dim": 96, "v_head_dim": 96},
        {"v_head_dim": 64},
        {"num_heads": 17, "num_kv_heads": 1},
    ],
    ids=["sinks", "head dim", "other values", "too many query heads"],
)
def test_a_layer_that_the_kernel_does_not_serve_is_left_to_the_backend(change):
    odd = replace(LAYER, name="odd", **change)
    with_forms, pieces = add_decode_attention(resolved(H200), program(LAYER, odd))
    assert set(with_forms.decode_attention) == {LAYER.name}
    assert len(pieces) == 2
