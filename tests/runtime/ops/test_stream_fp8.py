"""The fp8 linears for few tokens on Hopper, as far as they go without one: how they are divided, and their source."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.errors import ArtifactError
from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.cuda.source import kernel_source
from mllm_compile.runtime.ops.stream_fp8 import few
from mllm_compile.runtime.ops.stream_fp8.linear import GROUP, Fp8Kind
from mllm_compile.runtime.ops.stream_fp8.ops import _Loaded, load_kernels
from mllm_compile.runtime.ops.stream_fp8.shapes import (
    FP8_BUCKETS,
    MAX_FP8_TOKENS,
    choose_tiling,
    is_streamed,
    tiling_from_json,
)
from mllm_compile.runtime.ops.stream_linear.linear import bucket_of


def kinds(max_rows: int, columns: tuple[int, int]) -> st.SearchStrategy[Fp8Kind]:
    """Of up to `max_rows` x 64 rows, and columns of that range x 128."""
    return st.builds(
        Fp8Kind,
        rows=st.integers(1, max_rows).map(lambda n: 64 * n),
        columns=st.integers(*columns).map(lambda n: 128 * n),
        norm_blocks=st.sampled_from([0, 64]),
        gated=st.booleans(),
        residual=st.booleans(),
        bias=st.booleans(),
        group=st.sampled_from([0, GROUP]),
    )


KINDS = kinds(128, (1, 64)) | kinds(1023, (1, 224))


@given(KINDS)
def test_eight_tokens_divide_into_pieces_that_fit_beside_the_next_kernels(kind):
    tiling = few.choose(kind)
    assert 2 * (tiling.shared_bytes + 1024) <= 228 << 10
    assert tiling.stages >= 2
    assert tiling.num_blocks <= MULTIPROCESSORS, "all at once"
    assert tiling.clusters <= kind.rows // 16
    assert kind.columns % (tiling.split * GROUP) == 0
    of_pass = math.ceil(kind.columns / tiling.split / tiling.piece / tiling.passes) * tiling.piece
    assert of_pass * tiling.split * tiling.passes >= kind.columns
    assert tiling.input_registers <= 64


@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (24576, 4096), (1024, 3072), (64, 128)])
def test_weights_of_whole_groups_are_streamed(rows, columns):
    assert all(is_streamed(rows, columns, tokens) for tokens in FP8_BUCKETS)
    assert not is_streamed(rows, columns, MAX_FP8_TOKENS + 1)


@pytest.mark.parametrize(("rows", "columns"), [(4100, 1024), (1024, 192), (151936, 4096)])
def test_what_does_not_divide_and_heads_are_left_alone(rows, columns):
    assert not is_streamed(rows, columns, 8)


def test_names_tell_kernels_apart():
    kinds = [
        Fp8Kind(64, 256),
        Fp8Kind(64, 256, 8),
        Fp8Kind(64, 256, gated=True),
        Fp8Kind(64, 256, residual=True),
        Fp8Kind(64, 256, residual=True, next_blocks=4),
        Fp8Kind(64, 256, bias=True),
    ]
    kinds += [Fp8Kind(**{**vars(kind), "group": GROUP}) for kind in kinds]
    names = {choose_tiling(kind, tokens).name for kind in kinds for tokens in FP8_BUCKETS}
    assert len(names) == len(kinds) * len(FP8_BUCKETS)


@given(KINDS, st.sampled_from(FP8_BUCKETS))
def test_a_tiling_is_stored_with_all_that_its_launch_takes(kind, tokens):
    tiling = choose_tiling(kind, tokens)
    assert tiling_from_json(json.loads(json.dumps(tiling.to_json()))) == tiling


def test_a_kernel_that_the_runtime_does_not_hold_is_named(driver):
    driver()
    with pytest.raises(ArtifactError, match="fp8_64x256_norm0_t8; compile"):
        load_kernels([choose_tiling(Fp8Kind(64, 256), 8)], {}, torch.device("cuda:0"))


COMPILED = [
    *[Fp8Kind(24576, 4096, 256, gated=True, group=group) for group in (0, GROUP)],
    *[Fp8Kind(4096, 12288, residual=True, next_blocks=256, group=group) for group in (0, GROUP)],
    Fp8Kind(896, 4864, residual=True, group=GROUP),
    Fp8Kind(1152, 896, 56, bias=True),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("kind", COMPILED, ids=lambda kind: kind.name)
def test_the_source_compiles_without_spilling(tmp_path, kind):
    (tmp_path / "kernel.cu").write_text(kernel_source(choose_tiling(kind, 8)))
    command = ["nvcc", "-cubin", "-arch=sm_90a", "-Xptxas", "-v", "kernel.cu", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes spill stores", done.stderr) == ["0"]
    assert "warning" not in done.stderr


@pytest.mark.parametrize(
    ("kind", "num_tokens", "boxes"),
    [
        (Fp8Kind(4096, 4096, residual=True), 5, [(tensor_maps.panels, 16, 8)]),
        (Fp8Kind(24576, 4096, gated=True), 1, [(tensor_maps.halves, 16, 8)]),
    ],
)
def test_a_launch_reads_the_boxes_of_its_tiling(driver, monkeypatch, kind, num_tokens, boxes):
    """Values as elements of two bytes."""
    driver()
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(tensor_maps.TensorMaps, "get", lambda self, matrix, *boxes: asked.append((matrix, *boxes)))
    tiling = choose_tiling(kind, bucket_of(num_tokens))
    loaded = _Loaded(tiling, {tiling.name: b"binary"})
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(loaded._kernel, "launch", lambda *arguments: launches.append(arguments))
    x = torch.zeros(num_tokens, kind.columns, dtype=torch.bfloat16)
    values = torch.zeros(kind.rows, kind.columns, dtype=torch.float8_e4m3fn)
    loaded(x, values, torch.zeros(kind.rows, 1), [None] * 6, 0.0, num_tokens)
    assert [tuple(of) for _, *of in asked] == boxes
    assert asked[0][0].shape == (kind.rows, kind.columns // 2)
    assert launches[0][:2] == (tiling.num_blocks, tiling.num_threads)
