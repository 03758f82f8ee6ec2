"""The gated linear for many tokens on Hopper, as far as it goes without one: how it is divided, and its source."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.errors import ArtifactError
from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, kernel_source
from mllm_compile.runtime.ops.gated_linear import ops
from mllm_compile.runtime.ops.gated_linear.kernel import (
    LEAST_UNITS,
    MOST_UNITS,
    UNIT_TOKENS,
    GatedKernel,
    choose,
    divided,
    gated_kernels,
    is_taken,
)
from tests.runtime.compiled_source import check_compiles_without_spilling, needs_nvcc
from tests.sample import slow_but_a_sample

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
    division = divided(num_tokens)
    units = division.tiles * division.units + division.larger
    assert 64 * (units - 1) < num_tokens <= 64 * units
    assert 0 <= division.larger < division.tiles == math.ceil(units / 4)


@given(KERNELS)
def test_a_kernel_is_stored_with_all_that_its_launch_takes(kernel):
    data = json.loads(json.dumps(kernel.to_json()))
    assert GatedKernel.from_json(data) == kernel
    with pytest.raises(ValueError):
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


# The division of work of gated.cu as a program: for each block the tiles that it takes.
DIVISION = """
#include <algorithm>
#include <cstdio>
#include <cstdlib>
using std::min;
#define __device__
#define __forceinline__ inline
struct {{ int x; }} blockIdx, gridDim;
constexpr int UNIT_ROWS = 64, TILE_UNITS = 4, BAND = 8;
int SHARE, SETS;
{division}
int main(int, char** arguments) {{
  SHARE = atoi(arguments[1]), SETS = atoi(arguments[2]), gridDim.x = atoi(arguments[3]);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {{
    const Work work({{atoi(arguments[4]), atoi(arguments[5]), atoi(arguments[6]), atoi(arguments[7]), 0}});
    for (int turn = 0; work.has(turn); turn++) {{
      const Tile tile = work.tile(turn);
      printf("%d %d %d %d %d\\n", blockIdx.x, tile.token, tile.units, tile.row_tile, work.end_of(tile));
    }}
  }}
}}
"""


@dataclass(frozen=True)
class Tile:
    block: int
    token: int
    units: int
    row_tile: int
    end: int


@pytest.fixture(scope="module")
def division(tmp_path_factory):
    """How gated.cu divides so many tokens among the blocks of a kernel."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    source = Path(ops.__file__).with_name("gated.cu").read_text()
    found = re.search(r"^struct Tile \{.*?^(?=// The warp that asks)", source, re.DOTALL | re.MULTILINE)
    folder = tmp_path_factory.mktemp("division")
    (folder / "division.cpp").write_text(DIVISION.format(division=found[0]))
    subprocess.run(["g++", "-O1", "division.cpp", "-o", "division"], cwd=folder, check=True)

    def divide(kernel: GatedKernel, num_tokens: int) -> list[Tile]:
        sets = math.ceil(kernel.rows / kernel.tile_rows / kernel.share)
        tokens = divided(num_tokens)
        divided_into = (tokens.tiles, tokens.units, tokens.larger)
        numbers = (kernel.share, sets, kernel.num_blocks(num_tokens), num_tokens, *divided_into)
        done = subprocess.run([folder / "division", *map(str, numbers)], capture_output=True, text=True, check=True)
        return [Tile(*map(int, line.split())) for line in done.stdout.splitlines()]

    return divide


NUM_TOKENS = [
    1,
    8,
    64,
    65,
    136,
    192,
    200,
    256,
    257,
    300,
    320,
    321,
    384,
    448,
    449,
    500,
    832,
    1000,
    1984,
    2049,
    2240,
    8192,
]


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("shape", "tile_rows"), [((24576, 4096), 192), ((6144, 1024), 64), ((576, 2048), 128)])
def test_every_product_is_in_a_tile_and_only_the_last_overlaps(division, shape, tile_rows, num_tokens):
    kernel = GatedKernel(*shape, tile_rows)
    tiles = division(kernel, num_tokens)
    row_tiles = range(kernel.share * math.ceil(shape[0] / tile_rows / kernel.share))
    units, num_tiles = math.ceil(num_tokens / 64), divided(num_tokens).tiles
    by_rows: dict[int, list[Tile]] = {}
    for tile in sorted(tiles, key=lambda tile: tile.token):
        by_rows.setdefault(tile.row_tile, []).append(tile)
    for row_tile in row_tiles:
        own = by_rows[row_tile]
        assert sum(tile.units for tile in own) == units and len(own) == num_tiles
        assert own[0].token == 0 and own[-1].end == num_tokens
        gaps = [after.token - before.end for before, after in itertools.pairwise(own)]
        assert all(gap == 0 for gap in gaps[:-1]) and all(-64 < gap <= 0 for gap in gaps[-1:])
    assert len(tiles) == len(row_tiles) * num_tiles


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("tile_rows", [64, 128, 192])
def test_copies_of_x_fill_a_tile_and_read_nothing_that_is_not_there(division, tile_rows, num_tokens):
    kernel = GatedKernel(24576, 4096, tile_rows)
    box = kernel.box_tokens(num_tokens)
    assert box % 8 == 0, "where a swizzle begins"
    for tile in division(kernel, num_tokens):
        count = tile.end - tile.token
        copied = math.ceil(count / box) * box
        assert copied <= 256
        if num_tokens > 256:
            assert copied == count == 64 * tile.units
        else:
            assert copied < count + 8 * kernel.share


@pytest.mark.parametrize(("num_tokens", "most"), [(320, 5), (448, 7), (832, 14)])
def test_tiles_of_more_and_of_fewer_units_are_shared_out(division, num_tokens, most):
    """Among 66 clusters, an even number: in the same order every turn some would get the larger ones alone."""
    units: Counter[int] = Counter()
    for tile in division(GatedKernel(24576, 4096, 192), num_tokens):
        units[tile.block] += tile.units
    assert max(units.values()) == most


@given(st.integers(1, 800), st.integers(1, 64))
def test_no_kernel_is_compiled_for_nothing(rows, columns):
    kernels = gated_kernels(64 * rows, 64 * columns)
    chosen = {choose(kernels, units * UNIT_TOKENS) for units in range(LEAST_UNITS, MOST_UNITS + 1)}
    assert chosen == set(kernels)
    assert all(kernel.tile_rows <= 64 * rows for kernel in kernels)
    assert len({kernel.name for kernel in kernels}) == len(kernels)


@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (64, 96)])
def test_what_does_not_divide_is_left_alone(rows, columns):
    assert is_taken(64, 64)
    assert not is_taken(rows, columns)


@needs_nvcc
@pytest.mark.parametrize("tile_rows", slow_but_a_sample([64, 128, 192], 1))
def test_the_source_compiles_without_spilling(tmp_path, tile_rows):
    check_compiles_without_spilling(kernel_source(GatedKernel(24576, 4096, tile_rows)), tmp_path)


@pytest.fixture
def loaded(driver, monkeypatch):
    """A weight's kernels, loaded on device 0; what they launch and which maps they ask for, in the order of calls."""
    driver()
    monkeypatch.setattr(ops, "_WEIGHTS", {})
    kernels = gated_kernels(6144, 1024)
    ops.load_gated_kernels(kernels, {kernel.name: b"binary" for kernel in kernels}, torch.device("cuda:0"))
    return ops._WEIGHTS[0, 6144, 1024, 0]


@pytest.mark.parametrize(
    ("num_tokens", "boxes"), [(200, 200), (256, 256), (320, 64), (384, 192), (1000, 128), (8192, 128)]
)
def test_a_launch_takes_the_kernel_of_its_tokens_and_reads_no_more_than_these(loaded, monkeypatch, num_tokens, boxes):
    kernel = loaded.fastest(num_tokens)
    launches: list[tuple[Any, ...]] = []
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(kernel._loaded, "launch", lambda *arguments: launches.append(arguments))
    monkeypatch.setattr(tensor_maps.TensorMaps, "get", lambda self, matrix, *boxes: asked.append(boxes))
    x, weight = torch.zeros(num_tokens, 1024, dtype=torch.bfloat16), torch.zeros(6144, 1024, dtype=torch.bfloat16)
    kernel(x, weight, x.new_empty(num_tokens, 3072))
    assert asked == [(tensor_maps.spread_halves,), (tensor_maps.rows, boxes)]
    tiles = math.ceil(num_tokens / 256) * math.ceil(6144 / kernel.kernel.tile_rows)
    assert launches[0][:2] == (min(tiles, 132), 384)
    *_, tokens = launches[0][2]
    assert (tokens[0], tokens[-1]) == (num_tokens, boxes)


def test_a_kernel_is_loaded_once_and_again_where_its_code_is_another(driver, monkeypatch):
    fake = driver()
    monkeypatch.setattr(ops, "_WEIGHTS", {})
    kernels = gated_kernels(6144, 1024)
    for binary, count in ((b"first", 3), (b"first", 3), (b"second", 6)):
        ops.load_gated_kernels(kernels, {kernel.name: binary for kernel in kernels}, torch.device("cuda:0"))
        assert fake.calls.count("cuModuleLoadData") == count
        assert ops._WEIGHTS[0, 6144, 1024, 0].fastest(200).binary == binary


def test_the_op_hands_all_tokens_to_the_kernel(loaded, monkeypatch):
    calls: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def call(self, x, weight, out) -> None:
        calls.append((self.kernel.tile_rows, tuple(x.shape), tuple(out.shape)))

    monkeypatch.setattr(ops._Loaded, "__call__", call)
    monkeypatch.setattr(ops, "_WEIGHTS", {(-1, 6144, 1024, 0): loaded})
    x, weight = torch.zeros(1, 2100, 1024, dtype=torch.bfloat16), torch.zeros(6144, 1024, dtype=torch.bfloat16)
    assert ops.gated_linear(x, weight).shape == (1, 2100, 3072)
    assert calls == [(128, (2100, 1024), (2100, 3072))]
    with pytest.raises(RuntimeError, match="no kernel is loaded for 6144 x 512 on cpu"):
        ops.gated_linear(x[..., :512], weight[:, :512])


def test_a_kernel_that_the_runtime_does_not_hold_is_named(driver):
    driver()
    with pytest.raises(ArtifactError, match="gated_64x64_rows64; compile"):
        ops.load_gated_kernels(gated_kernels(64, 64), {}, torch.device("cuda:0"))
