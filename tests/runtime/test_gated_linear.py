"""The gated linear for many tokens on Hopper, as far as it goes without one: how it is divided, and its source."""

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
from mllm_compile.runtime.gated_linear import ops
from mllm_compile.runtime.gated_linear.kernel import TILE_TOKENS, GatedKernel, choose, gated_kernels, launches
from mllm_compile.runtime.gated_linear.shapes import is_taken

KERNELS = st.builds(
    GatedKernel,
    rows=st.integers(3, 900).map(lambda n: 64 * n),
    columns=st.integers(1, 128).map(lambda n: 64 * n),
    tile_rows=st.sampled_from([64, 128, 192]),
)


@given(KERNELS, st.integers(1, 20_000))
def test_tokens_and_rows_divide_into_tiles_that_fit(kernel, num_tokens):
    assert kernel.shared_bytes <= 227 << 10
    assert kernel.stages >= 4
    blocks = kernel.num_blocks(num_tokens)
    assert blocks <= MULTIPROCESSORS, "all at once"
    assert blocks % kernel.share == 0, "whole clusters"
    box = kernel.box_tokens(num_tokens)
    assert box % 8 == 0, "where a swizzle begins"
    assert min(num_tokens, TILE_TOKENS) <= box * kernel.share <= TILE_TOKENS
    assert box * kernel.share < num_tokens + 8 * kernel.share, "no more than there are"


@given(KERNELS)
def test_a_kernel_is_stored_with_all_that_its_launch_takes(kernel):
    data = json.loads(json.dumps(kernel.to_json()))
    assert GatedKernel.from_json(data) == kernel
    with pytest.raises(TypeError):
        GatedKernel.from_json(data | {"warps": 4})


@pytest.mark.parametrize(
    ("shape", "num_tokens", "tile_rows"),
    [
        ((24576, 4096), 256, 192),
        ((24576, 4096), 8192, 192),
        ((6144, 1024), 256, 64),
        ((6144, 1024), 2048, 192),
        ((6144, 1024), 8192, 192),
    ],
)
def test_what_was_measured_to_be_the_fastest_is_taken(shape, num_tokens, tile_rows):
    assert choose(gated_kernels(*shape), num_tokens).tile_rows == tile_rows


@given(st.integers(1, 20_000))
def test_launches_take_every_token_once_and_leave_no_tile_half_empty(num_tokens):
    parts = launches(num_tokens)
    assert sum(parts) in (num_tokens, 0)
    assert parts or 256 < num_tokens < 2048
    for part in parts:
        assert part <= 256 or part % 256 == 0 or part % 256 > 192


def test_the_library_is_asked_where_it_was_measured_to_be_the_faster():
    counts = (256, 257, 448, 449, 512, 1100, 1984, 2047, 2048, 2240, 2241)
    assert {count: launches(count) for count in counts if launches(count) != (count,)} == {
        257: (),
        448: (),
        1100: (),
        1984: (),
        2240: (2048, 192),
    }


def test_where_the_library_is_the_faster_it_is_called(loaded, monkeypatch):
    """320 tokens are a tile and a quarter."""
    monkeypatch.setattr(ops, "_WEIGHTS", {(-1, 128, 64): loaded})
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 64, generator=generator).to(torch.bfloat16) for size in (320, 128))
    gate, up = torch.nn.functional.linear(x, weight).chunk(2, -1)
    assert torch.equal(ops.gated_linear(x, weight), torch.nn.functional.silu(gate) * up)
    with pytest.raises(RuntimeError, match="no kernel is loaded for 128 x 32 on cpu"):
        ops.gated_linear(x[:, :32], weight[:, :32])


def test_what_is_left_over_of_many_tokens_has_a_launch_of_its_own(loaded, monkeypatch):
    calls: list[tuple[int, int, int]] = []

    def call(self, x, weight, out) -> None:
        calls.append((self.kernel.tile_rows, len(x), out.storage_offset() // 3072))

    monkeypatch.setattr(ops._Loaded, "__call__", call)
    monkeypatch.setattr(ops, "_WEIGHTS", {(-1, 6144, 1024): loaded})
    x, weight = torch.zeros(1, 2100, 1024, dtype=torch.bfloat16), torch.zeros(6144, 1024, dtype=torch.bfloat16)
    out = ops.gated_linear(x, weight)
    assert out.shape == (1, 2100, 3072)
    assert calls == [(192, 2048, 0), (64, 52, 2048)]


@given(st.integers(1, 800), st.integers(1, 64))
def test_no_kernel_is_compiled_for_nothing(rows, columns):
    kernels = gated_kernels(64 * rows, 64 * columns)
    chosen = {choose(kernels, tiles * TILE_TOKENS) for tiles in range(1, 64)}
    assert chosen == set(kernels)
    assert all(kernel.tile_rows <= 64 * rows for kernel in kernels)
    assert len({kernel.name for kernel in kernels}) == len(kernels)


@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (64, 96)])
def test_what_does_not_divide_is_left_alone(rows, columns):
    assert is_taken(64, 64)
    assert not is_taken(rows, columns)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("tile_rows", [64, 128, 192])
def test_the_source_compiles_without_spilling(tmp_path, tile_rows):
    (tmp_path / "kernel.cu").write_text(kernel_source(GatedKernel(24576, 4096, tile_rows)))
    command = ["nvcc", "-cubin", "-arch=sm_90a", "-Xptxas", "-v", "kernel.cu", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes spill stores", done.stderr) == ["0"]
    assert "warning" not in done.stderr
    assert "Performance Loss" not in done.stderr, "products of wgmma wait for each other"


@pytest.fixture
def loaded(driver, monkeypatch):
    """A weight's kernels, loaded on device 0; what they launch and which maps they ask for, in the order of calls."""
    driver()
    monkeypatch.setattr(ops, "_WEIGHTS", {})
    kernels = gated_kernels(6144, 1024)
    ops.load_gated_kernels(kernels, {kernel.name: b"binary" for kernel in kernels}, torch.device("cuda:0"))
    return ops._WEIGHTS[0, 6144, 1024]


@pytest.mark.parametrize(("num_tokens", "boxes"), [(200, 200), (256, 256), (1000, 128), (8192, 128)])
def test_a_launch_takes_the_kernel_of_its_tokens_and_reads_no_more_than_these(loaded, monkeypatch, num_tokens, boxes):
    ((kernel, *tokens),) = loaded.plan(num_tokens)
    assert tokens == [0, num_tokens]
    launches: list[tuple[object, ...]] = []
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(kernel._loaded, "launch", lambda *arguments: launches.append(arguments))
    monkeypatch.setattr(tensor_maps.TensorMaps, "get", lambda self, matrix, *boxes: asked.append(boxes))
    x, weight = torch.zeros(num_tokens, 1024, dtype=torch.bfloat16), torch.zeros(6144, 1024, dtype=torch.bfloat16)
    kernel(x, weight, x.new_empty(num_tokens, 3072))
    assert asked == [(tensor_maps.spread_halves,), (tensor_maps.rows, boxes)]
    tiles = math.ceil(num_tokens / 256) * math.ceil(6144 / kernel.kernel.tile_rows)
    assert launches[0][:2] == (min(tiles, 132), 384)


def test_a_kernel_is_loaded_once_and_again_where_its_code_is_another(driver, monkeypatch):
    fake = driver()
    monkeypatch.setattr(ops, "_WEIGHTS", {})
    kernels = gated_kernels(6144, 1024)
    for binary, count in ((b"first", 3), (b"first", 3), (b"second", 6)):
        ops.load_gated_kernels(kernels, {kernel.name: binary for kernel in kernels}, torch.device("cuda:0"))
        assert fake.calls.count("cuModuleLoadData") == count
        ((loaded, *_),) = ops._WEIGHTS[0, 6144, 1024].plan(200)
        assert loaded.binary == binary


def test_a_kernel_that_the_runtime_does_not_hold_is_named(driver):
    driver()
    with pytest.raises(ArtifactError, match="gated_64x64_rows64; compile"):
        ops.load_gated_kernels(gated_kernels(64, 64), {}, torch.device("cuda:0"))
