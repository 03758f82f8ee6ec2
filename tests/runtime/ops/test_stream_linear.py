"""The kernels for few tokens on Hopper, as far as they go without one: how linears are divided, and their source."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.errors import ArtifactError, DeviceError
from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import Argument, TensorMap
from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, kernel_source
from mllm_compile.runtime.ops import family
from mllm_compile.runtime.ops.stream_linear import lanes, rows, tiles, undivided, wide
from mllm_compile.runtime.ops.stream_linear.linear import (
    MAX_STREAMED_TOKENS,
    NORM_ROWS,
    TOKEN_BUCKETS,
    LinearKind,
    bucket_of,
)
from mllm_compile.runtime.ops.stream_linear.ops import STREAMED
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling, is_streamed, tiling_from_json
from mllm_compile.runtime.ops.stream_linear.streamed_ops import LoadedLinear
from tests.runtime.compiled_source import check_compiles_without_spilling, needs_nvcc
from tests.sample import slow_but_a_sample, slow_but_a_sample_of_each

_SHARED_BYTES = 227 << 10  # of a block on an H200
_MULTIPROCESSOR_BYTES = 228 << 10
_STATIC_BYTES = 1024


def kinds(max_rows: int, columns: tuple[int, int], norm_blocks: int) -> st.SearchStrategy[LinearKind]:
    """Of up to `max_rows` x 64 rows, and columns of that range x 64."""
    return st.builds(
        LinearKind,
        rows=st.integers(1, max_rows).map(lambda n: 64 * n),
        columns=st.integers(*columns).map(lambda n: 64 * n),
        norm_blocks=st.sampled_from([0, norm_blocks]),
        gated=st.booleans(),
        residual=st.booleans(),
        bias=st.booleans(),
    )


KINDS = kinds(256, (1, 256), 32) | kinds(2400, (1, 128), 32)
WIDE_KINDS = kinds(1023, (24, 512), 256).filter(lambda kind: rows.takes(kind.rows, kind.columns))


UNDIVIDED = [
    LinearKind(6144, 4096, bias=True),
    LinearKind(4096, 12288),
    LinearKind(24576, 4096, gated=True),
    LinearKind(151936, 1024),
    LinearKind(64, 64),
]
FEW_TOKENS = [tokens for tokens in TOKEN_BUCKETS if tokens <= tiles.MAX_TOKENS]
MANY_TOKENS = [tokens for tokens in TOKEN_BUCKETS if tokens > tiles.MAX_TOKENS]


@given(KINDS, st.sampled_from(FEW_TOKENS))
def test_a_weight_divides_into_tiles_that_fit(kind, tokens):
    tiling = tiles.choose(kind, tokens)
    num_tiles = math.ceil(kind.rows / tiling.rows)
    assert tiling.rows % NORM_ROWS == 0
    assert tiling.rows <= (128 if kind.residual or kind.bias else 256), "of registers; of wgmma and of a box"
    assert kind.columns % (tiling.split * tiling.panels * 64) == 0
    assert tiling.shared_bytes <= _SHARED_BYTES
    steps = kind.columns // (64 * tiling.split * tiling.panels)
    assert min(2, steps) <= tiling.stages <= min(steps, 32)
    assert tiling.num_blocks <= MULTIPROCESSORS, "all at once"
    if tiling.split > 1:
        assert tiling.num_blocks == num_tiles * tiling.split, "one tile a cluster"
    else:
        turns = math.ceil(num_tiles / tiling.num_blocks)
        assert num_tiles > (turns - 1) * MULTIPROCESSORS, "no turn is for nothing"


@given(KINDS, st.sampled_from(undivided.BUCKETS))
def test_a_weight_whose_inputs_are_not_divided_has_tiles_that_fit(kind, tokens):
    tiling = undivided.choose_undivided(kind, tokens)
    assert tiling.split == 1 and tiling.name not in {tiles.choose(kind, tokens).name, choose_tiling(kind, tokens).name}
    assert tiling.rows <= (128 if kind.residual or kind.bias else 256)
    assert tiling.shared_bytes <= _SHARED_BYTES and tiling.num_blocks <= MULTIPROCESSORS
    assert min(2, kind.columns // (64 * tiling.panels)) <= tiling.stages
    assert family("one_order").from_json(json.loads(json.dumps(tiling.to_json()))) == tiling


@needs_nvcc
@pytest.mark.parametrize("kind", slow_but_a_sample(UNDIVIDED, 1), ids=lambda kind: kind.name)
def test_kernels_of_few_rows_in_one_order_compile_without_spilling(kind, tmp_path):
    for tokens in undivided.BUCKETS:
        check_compiles_without_spilling(
            kernel_source(undivided.choose_undivided(kind, tokens, ahead_bytes=20 << 20)), tmp_path
        )


@given(KINDS, st.sampled_from(MANY_TOKENS))
def test_every_division_of_many_tokens_fits(kind, tokens):
    tilings = list(wide.WideTiling.all_of(kind, tokens))
    assert wide.choose(kind, tokens) in tilings
    for tiling in tilings:
        assert tiling.tile_tokens % 8 == 0
        assert tiling.tile_tokens <= 256, "columns of a wgmma"
        assert tiling.tile_tokens // tiling.parts % 8 == 0
        assert tiling.tile_tokens * tiling.token_tiles >= tokens
        assert kind.columns % (tiling.split * 64) == 0
        steps = kind.columns // (64 * tiling.split)
        assert min(2, steps) <= tiling.x_stages <= tiling.weight_stages <= steps
        assert tiling.shared_bytes <= _SHARED_BYTES
        assert tiling.num_blocks <= MULTIPROCESSORS, "all at once"
        if tiling.split > 1:
            assert tiling.num_blocks == tiling.num_tiles * tiling.split, "one tile a cluster"
        sums = tiling.tile_tokens / 2
        residuals = sums / 2 / tiling.split if kind.residual else 0
        assert sums + residuals <= {1: 192, 2: 192, 3: 144}[tiling.groups], "of a thread's registers"


@given(KINDS, st.sampled_from(MANY_TOKENS), st.integers(1, 16))
def test_tiles_of_many_tokens_hold_all_of_them(kind, tokens, fewer):
    count = tokens - 16 + fewer
    for tiling in wide.WideTiling.all_of(kind, tokens):
        box = tiling.box_tokens(count)
        first = [min(tile * box, count - box) for tile in range(tiling.token_tiles)]  # as wide.cu's Division
        assert box <= tiling.tile_tokens
        assert {token for begin in first for token in range(begin, begin + box)} == set(range(count))


@given((kinds(132, (1, 64), 32) | kinds(20, (32, 128), 32)).filter(lanes.takes))
def test_a_small_weight_divides_into_tiles_that_all_blocks_hold(kind):
    tiling = lanes.choose(kind)
    rows_of_block = tiling.tiles * lanes.TILE_ROWS * (2 if kind.gated else 1)
    assert tiling.num_blocks <= MULTIPROCESSORS, "all at once"
    assert (tiling.num_blocks - 1) * rows_of_block < kind.rows <= tiling.num_blocks * rows_of_block
    assert tiling.tiles <= tiling.warps, "a warp finishes one"
    assert lanes.MAX_TOKENS <= tiling.warps <= 32, "and adds up the squares of one token"
    assert rows_of_block * kind.columns * 2 <= tiling.shared_bytes <= _SHARED_BYTES
    assert tiling.steps <= 10, "whose inputs are in registers"
    assert choose_tiling(kind, 8) == tiling


@given(WIDE_KINDS)
def test_a_large_weight_divides_into_pieces_of_rows_that_fit(kind):
    tiling = rows.choose(kind)
    columns = kind.columns // tiling.split
    assert columns * tiling.split == kind.columns
    assert columns % 32 == 0
    assert tiling.piece % (32 * tiling.warps) == 0
    assert tiling.stages >= 2
    assert tiling.resident * (tiling.shared_bytes + _STATIC_BYTES) <= _MULTIPROCESSOR_BYTES
    steps = math.ceil(columns / tiling.piece) * math.ceil(tiling.piece / rows.STEP / tiling.warps)
    assert 4 * steps <= 96, "a lane has its inputs in registers"
    early = tiling.constants()["EARLY_STAGES"]
    assert (early - 1) * tiling.stage_bytes * tiling.resident < 64 << 10 <= early * tiling.stage_bytes * tiling.resident


@pytest.mark.parametrize(
    ("kind", "tokens", "division"),
    [
        (LinearKind(4096, 1024, 64), 16, (64, 2, 1, 8)),
        (LinearKind(1024, 2048, residual=True), 16, (48, 4, 1, 8)),
        (LinearKind(6144, 1024, 64, gated=True), 16, (96, 2, 1, 6)),
        (LinearKind(4096, 1024, 64), 64, (64, 2, 4, 2)),
        (LinearKind(1024, 3072, residual=True), 64, (48, 4, 4, 3)),
        (LinearKind(4096, 1024, 64), 128, (32, 1, 1, 11)),
        (LinearKind(6144, 4096, 256), 64, (96, 2, 2, 5)),
        (LinearKind(4096, 12288, residual=True), 128, (64, 2, 1, 8)),
        (LinearKind(24576, 4096, 256, gated=True), 64, (192, 1, 2, 3)),
        (LinearKind(24576, 4096, 256, gated=True), 128, (192, 1, 1, 5)),
        (LinearKind(51200, 5120, 320, gated=True), 64, (208, 1, 2, 3)),
        (LinearKind(151936, 4096, 256), 8, (192, 1, 2, 4)),
    ],
)
def test_of_tiles_what_was_measured_to_be_the_fastest_is_taken(kind, tokens, division):
    tiling = tiles.choose(kind, tokens)
    assert (tiling.rows, tiling.split, tiling.panels, tiling.stages) == division


@pytest.mark.parametrize(
    ("kind", "tokens", "division"),
    [
        (LinearKind(4096, 4096, residual=True, next_blocks=256), 208, (1, 1, 2, 5)),
        (LinearKind(4096, 12288, residual=True, next_blocks=256), 144, (1, 1, 2, 7)),
        (LinearKind(24576, 4096, 256, gated=True), 176, (3, 1, 1, 4)),
        (LinearKind(24576, 4096, 256, gated=True), 240, (3, 1, 1, 4)),
        (LinearKind(6144, 1024, 64, gated=True), 208, (1, 1, 1, 6)),
        (LinearKind(4096, 1024, 64), 256, (1, 2, 1, 9)),
        (LinearKind(1024, 3072, residual=True, next_blocks=128), 208, (1, 3, 2, 12)),
    ],
)
def test_of_wide_tiles_what_was_measured_to_be_the_fastest_is_taken(kind, tokens, division):
    tiling = wide.choose(kind, tokens)
    assert (tiling.groups, tiling.token_tiles, tiling.split, tiling.x_stages) == division


@pytest.mark.parametrize(
    ("kind", "division"),
    [
        (LinearKind(6144, 4096, 256), (2, 8, 1024, 3)),
        (LinearKind(4096, 4096, residual=True, next_blocks=256), (2, 8, 1024, 3)),
        (LinearKind(24576, 4096, 256, gated=True), (2, 8, 1024, 3)),
        (LinearKind(4096, 12288, residual=True, next_blocks=256), (2, 16, 1024, 6)),
        (LinearKind(19456, 2560, 160, gated=True), (2, 8, 1280, 2)),
    ],
)
def test_of_rows_what_was_measured_to_be_the_fastest_is_taken(kind, division):
    tiling = choose_tiling(kind, 8)
    assert (tiling.split, tiling.warps, tiling.piece, tiling.stages) == division


@pytest.mark.parametrize(("rows", "columns"), [(4096, 1024), (6144, 1024), (1024, 3072), (64, 256), (32, 2880)])
def test_small_weights_are_streamed_for_any_of_the_steps(rows, columns):
    assert all(is_streamed(rows, columns, tokens) for tokens in TOKEN_BUCKETS)


@pytest.mark.parametrize(("rows", "columns"), [(6144, 4096), (24576, 4096), (4096, 12288), (12288, 2048)])
def test_large_ones_for_fewer(rows, columns):
    assert [tokens for tokens in TOKEN_BUCKETS if not is_streamed(rows, columns, tokens)] == [224, 240, 256]


def test_a_head_is_streamed_for_fewer():
    assert [tokens for tokens in TOKEN_BUCKETS if is_streamed(151936, 4096, tokens)] == [8, 16, 32, 64]


def test_a_head_of_rows_that_do_not_divide_is_left_to_tiles():
    streamed = [tokens for tokens in TOKEN_BUCKETS if is_streamed(51866, 1280, tokens)]
    assert streamed == [8, 16, 32, 64]
    assert {choose_tiling(LinearKind(51866, 1280), tokens).source for tokens in streamed} == {
        "ops/stream_linear/tiles.cu"
    }
    assert not is_streamed(51865, 1280, 8) and not is_streamed(1026, 1280, 8)


@pytest.mark.parametrize(
    ("rows", "columns", "source"),
    [
        (6144, 4096, "rows"),
        (2560, 9728, "rows"),
        (1024, 3072, "lanes"),
        (4096, 1536, "lanes"),
        (8192, 64, "lanes"),
        (8448, 64, "lanes"),
        (8512, 64, "tiles"),
        (2112, 3328, "lanes"),
        (2176, 3072, "tiles"),
        (1024, 5120, "lanes"),
        (1024, 5184, "tiles"),
        (4096, 2048, "rows"),
        (128256, 4096, "tiles"),
        (33856, 16640, "rows"),
        (4096, 24576, "rows"),
        (8192, 28672, "tiles"),
    ],
)
def test_up_to_eight_tokens_have_a_kernel_for_small_weights_and_one_for_large_ones(rows, columns, source):
    assert choose_tiling(LinearKind(rows, columns), 8).source == f"ops/stream_linear/{source}.cu"
    assert choose_tiling(LinearKind(rows, columns), 16).source == "ops/stream_linear/tiles.cu"


@pytest.mark.parametrize(
    ("rows", "columns"), [(4100, 1024), (1024, 96), (1024, 1000), (2**26, 256), (96, 2880), (16, 2880)]
)
def test_what_does_not_divide_is_left_alone(rows, columns):
    assert not is_streamed(rows, columns, 64)


def test_a_step_takes_the_first_bucket_that_holds_it():
    assert [bucket_of(count) for count in (1, 8, 9, 17, 64, 65, 129, 145)] == [8, 8, 16, 32, 64, 128, 144, 160]
    with pytest.raises(ValueError, match="257 tokens"):
        bucket_of(MAX_STREAMED_TOKENS + 1)


def test_names_tell_kernels_apart():
    kinds = [
        LinearKind(64, 256),
        LinearKind(64, 256, 8),
        LinearKind(64, 256, gated=True),
        LinearKind(64, 256, residual=True),
        LinearKind(64, 256, residual=True, next_blocks=8),
        LinearKind(64, 256, residual=True, next_blocks=8, plus_one=True),
        LinearKind(64, 256, bias=True),
        LinearKind(64, 256, squared_relu=True),
        LinearKind(64, 256, gelu=True),
        LinearKind(64, 256, residual=True, bias=True),
    ]
    names = {choose_tiling(kind, tokens).name for kind in kinds for tokens in TOKEN_BUCKETS}
    assert len(names) == len(kinds) * len(TOKEN_BUCKETS)


def test_a_kernel_that_the_runtime_does_not_hold_is_named(driver):
    driver()
    with pytest.raises(ArtifactError, match="64x256_norm0_t8; compile"):
        STREAMED.load_kernels([choose_tiling(LinearKind(64, 256), 8)], {}, torch.device("cuda:0"))


@given(KINDS | WIDE_KINDS)
def test_a_tiling_is_stored_with_all_that_its_launch_takes(kind):
    for tiling in (
        tiles.choose(kind, 8),
        wide.choose(kind, 144),
        *([rows.choose(kind)] if rows.takes(kind.rows, kind.columns) else []),
        *([lanes.choose(kind)] if lanes.takes(kind) else []),
    ):
        assert tiling_from_json(json.loads(json.dumps(tiling.to_json()))) == tiling


PLUS_ONE = LinearKind(4096, 12288, residual=True, next_blocks=256, plus_one=True)


COMPILED = [
    *[(LinearKind(6144, 1024, 64, gated=True), tokens) for tokens in TOKEN_BUCKETS],
    *[(LinearKind(1024, 2048, residual=True, next_blocks=128), tokens) for tokens in TOKEN_BUCKETS],
    *[(LinearKind(24576, 4096, 256, gated=True), tokens) for tokens in (16, 128, *MANY_TOKENS)],
    *[(PLUS_ONE, tokens) for tokens in (16, 64, 128, 208)],
    (LinearKind(151936, 4096, 256), 64),
    (LinearKind(32768, 4096, gated=True), 128),
    (LinearKind(33792, 4096, residual=True, next_blocks=2112), 128),
    (LinearKind(14784, 4096, residual=True, next_blocks=924), 256),
    (LinearKind(28672, 4096, 256, gated=True), 240),
    *[(LinearKind(6144, 4096, 256), tokens) for tokens in (144, 160)],
    (LinearKind(19456, 2560, 160, gated=True), 144),
    (LinearKind(10240, 5120, 320), 176),
    (LinearKind(7168, 5120, 320, bias=True), 160),
    (LinearKind(17408, 2048, residual=True, next_blocks=1088), 208),
    (LinearKind(64, 64), 144),
    *[(LinearKind(32, 2880, bias=True), tokens) for tokens in (8, 64, 256)],
    *[(LinearKind(1152, 896, 56, bias=True), tokens) for tokens in (8, 256)],
    (LinearKind(4608, 3584, 224, bias=True), 8),
    (LinearKind(1024, 3072, residual=True, next_blocks=128), 8),
    (LinearKind(2048, 2304, residual=True, next_blocks=256, plus_one=True), 8),
    (LinearKind(896, 4864, residual=True, next_blocks=112), 8),
    (LinearKind(8384, 832, 104, squared_relu=True), 8),
    (LinearKind(33792, 4096, 256, bias=True, squared_relu=True), 128),
    (LinearKind(14784, 1024, 64, bias=True, squared_relu=True), 240),
    (LinearKind(21504, 4096, 256, squared_relu=True), 8),
    (LinearKind(24576, 4096, 256, gated=True), 8),
    (LinearKind(1280, 1280, residual=True, bias=True), 8),
    *[(LinearKind(51866, 1280), tokens) for tokens in (8, 64)],
    *[(LinearKind(5120, 1280, bias=True, gelu=True), tokens) for tokens in (8, 16, 64, 160, 256)],
    *[(LinearKind(1280, 5120, residual=True, bias=True), tokens) for tokens in (8, 64, 160)],
    (PLUS_ONE, 8),
    (LinearKind(4096, 24576, residual=True, next_blocks=256), 8),
]


@needs_nvcc
@pytest.mark.parametrize(
    ("kind", "tokens"),
    slow_but_a_sample_of_each(lambda one: type(choose_tiling(*one)), COMPILED, 1),  # of each source
    ids=lambda value: getattr(value, "name", None),
)
def test_the_source_compiles_without_spilling(tmp_path, kind, tokens):
    check_compiles_without_spilling(kernel_source(choose_tiling(kind, tokens)), tmp_path)


def test_an_error_of_loading_a_kernel_says_how_to_do_without(driver, monkeypatch):
    driver(fails="cuModuleLoadData")
    monkeypatch.setattr(STREAMED, "_loaded", {})
    tiling = choose_tiling(LinearKind(64, 256), 8)
    with pytest.raises(DeviceError, match=r"64x256_norm0_t8.*disable_passes: \[stream_linears\]"):
        STREAMED.load_kernels([tiling], {tiling.name: b""}, torch.device("cuda:0"))


def test_a_process_loads_a_binary_once(driver, monkeypatch):
    fake = driver()
    monkeypatch.setattr(STREAMED, "_loaded", {})
    tilings = [choose_tiling(LinearKind(64, 256), tokens) for tokens in TOKEN_BUCKETS]
    binaries = {tiling.name: b"first" for tiling in tilings}
    for _ in range(2):
        STREAMED.load_kernels(tilings, binaries, torch.device("cuda:0"))
    assert fake.calls.count("cuModuleLoadData") == len(TOKEN_BUCKETS)
    STREAMED.load_kernels(tilings, dict.fromkeys(binaries, b"second"), torch.device("cuda:0"))
    assert fake.calls.count("cuModuleLoadData") == 2 * len(TOKEN_BUCKETS)
    divided_otherwise = replace(tilings[0], warps=2 * tilings[0].warps)
    STREAMED.load_kernels([divided_otherwise], {divided_otherwise.name: b"second"}, torch.device("cuda:0"))
    assert fake.calls.count("cuModuleLoadData") == 2 * len(TOKEN_BUCKETS) + 1


@pytest.mark.parametrize(
    ("kind", "num_tokens", "division", "boxes", "launch"),
    [
        # As many tokens as there are, and gates beside ups.
        (
            LinearKind(24576, 2048, gated=True),
            13,
            {"panels": 2, "rows": 192},
            [(tensor_maps.halves, 192, 2), (tensor_maps.rows, 13)],
            (128, 256),
        ),
        # Tiles of many tokens, as even as can be.
        (
            LinearKind(1024, 2048, residual=True),
            193,
            {"groups": 1, "token_tiles": 3, "split": 2},
            [(tensor_maps.panels, 64, 1), (tensor_maps.rows, 72)],
            (96, 256),
        ),
    ],
)
def test_a_launch_reads_the_boxes_of_its_tiling(driver, monkeypatch, kind, num_tokens, division, boxes, launch):
    driver()
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(tensor_maps.TensorMaps, "get", lambda self, matrix, *boxes: asked.append(boxes))
    tiling = choose_tiling(kind, bucket_of(num_tokens))
    assert {name: getattr(tiling, name) for name in division} == division
    loaded = LoadedLinear(tiling, {tiling.name: b"binary"})
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(loaded._loaded, "launch", lambda *arguments: launches.append(arguments))
    x, weight = (torch.zeros(rows, kind.columns, dtype=torch.bfloat16) for rows in (num_tokens, kind.rows))
    loaded(x, (weight,), [None] * 6, 0.0, num_tokens)
    assert asked == boxes
    assert launches[0][:2] == launch


def test_a_launch_holds_its_tensor_maps_whatever_the_cache_of_maps_forgets(driver, monkeypatch):
    driver()
    monkeypatch.setattr(tensor_maps.TensorMaps, "_MOST", 1)
    tiling = choose_tiling(LinearKind(64, 256), 16)
    loaded = LoadedLinear(tiling, {tiling.name: b"binary"})
    launches: list[tuple[Argument, ...]] = []
    monkeypatch.setattr(loaded._loaded, "launch", lambda blocks, threads, arguments: launches.append(arguments))
    x, weight = torch.zeros(4, 256, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16)
    loaded(x, (weight,), [None] * 6, 0.0, 4)
    assert [isinstance(argument, TensorMap) for argument in launches[0]] == [True] * 2 + [False] * 8


def test_a_launch_compares_no_tilings(monkeypatch):
    """A capture launches each linear for each of its sizes, and comparing takes longer than all else."""
    launched: list[LinearKind] = []
    monkeypatch.setattr(STREAMED, "_launch", lambda x, weight, kind, *of: launched.append(kind))
    x, weight = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(4096, 4096, dtype=torch.bfloat16)
    first = STREAMED._residual_norm(x, weight, x, weight[0])
    monkeypatch.setattr(rows, "RowTiling", None)
    second = STREAMED._residual_norm(x, weight, x, weight[0])
    assert [one.shape for one in second] == [one.shape for one in first]
    assert launched[0] == launched[1]
