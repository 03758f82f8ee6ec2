"""The linear in fp8 for up to 256 tokens on Hopper, as far as it goes without one: its division, its source, and the
choice of the kernel."""

from __future__ import annotations

import ctypes
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from mllm_compile.errors import ArtifactError, DeviceError
from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, kernel_source
from mllm_compile.runtime.ops import family, op
from mllm_compile.runtime.ops.scaled_linear import ops
from mllm_compile.runtime.ops.scaled_linear.kernel import (
    BUCKETS,
    FEWEST_TOKENS,
    MAX_TOKENS,
    ScaledKind,
    ScaledTiling,
    bucket_of,
    choose,
    is_taken,
    scaled_kernels,
    tiling_from_json,
)
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind
from tests.runtime.compiled_source import check_compiles_without_spilling, needs_nvcc
from tests.sample import slow_but_a_sample

_SHARED_BYTES = 227 << 10  # of a block on an H200
_GPU = torch.device("cuda:0")

KINDS = st.builds(
    ScaledKind,
    rows=(st.integers(1, 64) | st.integers(1, 2400)).map(lambda n: 64 * n),
    columns=(st.integers(1, 16) | st.integers(1, 256)).map(lambda n: 128 * n),
)


@given(KINDS, st.sampled_from(BUCKETS))
def test_every_division_fits(kind, tokens):
    tilings = list(ScaledTiling.all_of(kind, tokens))
    assert choose(kind.rows, kind.columns, tokens) in tilings
    for tiling in tilings:
        assert tiling.tile_tokens % 8 == 0
        assert tiling.tile_tokens <= 256, "columns of a wgmma"
        assert tiling.tile_tokens // tiling.parts % 8 == 0
        assert tiling.tile_tokens * tiling.token_tiles >= tokens
        assert kind.columns % (tiling.split * 128) == 0
        steps = kind.columns // (128 * tiling.split)
        assert min(2, steps) <= tiling.x_stages <= tiling.weight_stages <= steps
        assert tiling.shared_bytes <= _SHARED_BYTES
        assert tiling.num_blocks <= MULTIPROCESSORS, "all at once"
        if tiling.split > 1:
            assert tiling.num_blocks == tiling.num_tiles * tiling.split, "one tile a cluster"
        assert tiling.tile_tokens / 2 <= {1: 192, 2: 192, 3: 144}[tiling.groups], "sums in a thread's registers"


@given(KINDS, st.integers(FEWEST_TOKENS, MAX_TOKENS))
def test_tiles_hold_all_tokens_and_no_other(kind, count):
    for tiling in ScaledTiling.all_of(kind, bucket_of(count)):
        box = tiling.box_tokens(count)
        first = [min(tile * box, count - box) for tile in range(tiling.token_tiles)]  # as wide.cu's Division
        assert box <= tiling.tile_tokens
        assert {token for begin in first for token in range(begin, begin + box)} == set(range(count))


def test_a_step_takes_the_first_bucket_that_holds_it():
    assert [bucket_of(count) for count in (8, 64, 65, 96, 97, 160, 161, 256)] == [64, 64, 96, 96, 128, 160, 192, 256]


@pytest.mark.parametrize(
    ("rows", "columns", "taken"),
    [
        (24576, 4096, True),
        (6144, 4096, True),
        (4096, 3072, True),
        (64, 128, True),
        (151936, 4096, True),
        (896, 1216, False),
        (4096, 64, False),
        (1520, 1024, False),
        (2**24, 128, False),
    ],
)
def test_weights_that_divide_are_taken(rows, columns, taken):
    """A quarter of 0.5B's 4864 inputs are no whole panels; outputs of 2**24 rows are more than 32 bits count."""
    assert is_taken(rows, columns) is taken


def test_names_tell_kernels_apart():
    kinds = [ScaledKind(64, 256), ScaledKind(256, 256), ScaledKind(64, 512)]
    names = {tiling.name for kind in kinds for tiling in scaled_kernels(kind.rows, kind.columns)}
    assert len(names) == len(kinds) * len(BUCKETS)
    assert LinearKind(64, 256).name != ScaledKind(64, 256).name


@given(KINDS, st.sampled_from(BUCKETS))
def test_a_tiling_is_stored_with_all_that_its_launch_takes(kind, tokens):
    tiling = choose(kind.rows, kind.columns, tokens)
    data = json.loads(json.dumps(tiling.to_json()))
    assert family("scaled_linear").from_json(data) == tiling
    with pytest.raises(ValueError, match="warps"):
        tiling_from_json(data | {"warps": 4})


def piece_of(*weights: tuple[tuple[int, int], int]) -> fx.GraphModule:
    """A piece that multiplies by weights [N, K] with so many scales a row."""
    graph = fx.Graph()
    products = []
    for number, ((rows, columns), groups) in enumerate(weights):
        shapes = {"x": (5, columns), "x_scales": (5, groups), "values": (rows, columns), "scales": (rows, groups)}
        operands = [graph.placeholder(f"{name}{number}") for name in shapes]
        for operand, shape in zip(operands, shapes.values(), strict=True):
            operand.meta["val"] = torch.empty(shape, device="meta")
        products.append(graph.call_function(op("scaled_linear"), tuple(operands)))
    graph.output(tuple(products))
    return fx.GraphModule({}, graph)


def test_a_program_has_the_kernels_of_the_weights_that_are_taken():
    """Each once. Weights with a scale for 128 inputs, and those that do not divide, are the library's."""
    first = piece_of(((1536, 1024), 1), ((1024, 1024), 8), ((1520, 1024), 1))
    second = piece_of(((1536, 1024), 1), ((64, 128), 1))
    wanted = family("scaled_linear").wanted([(first, None), (second, 64)])
    assert wanted == (*scaled_kernels(1536, 1024), *scaled_kernels(64, 128))
    assert family("scaled_linear").wanted([(piece_of(((1024, 1024), 8)), None)]) == ()


class Multipliers:
    """Stand-ins for the kernels of a weight on a CPU, and for the library: each writes down whom it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
        self.called: list[int | str] = []
        self.operands: list[torch.Tensor] = []
        loaded = {(-1, rows, columns, tokens): self._kernel(tokens) for tokens in BUCKETS}
        monkeypatch.setattr(ops, "_LOADED", loaded)
        monkeypatch.setattr(torch, "_scaled_mm", self._library)

    def _kernel(self, tokens: int):
        def call(*operands: torch.Tensor) -> None:
            self.called.append(tokens)
            *self.operands, out = operands
            out.copy_(ops.scaled_linear_reference(*self.operands))

        return call

    def _library(
        self, x: torch.Tensor, values: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **_options: object
    ) -> torch.Tensor:
        self.called.append("library")
        return ops.scaled_linear_reference(x, scale_a, values.t(), scale_b.t())


def operands_of(tokens: int, rows: int, columns: int, groups: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x, values = (torch.randn(n, columns, generator=generator).to(torch.float8_e4m3fn) for n in (tokens, rows))
    x_scales, scales = (torch.rand(n, groups, generator=generator) for n in (tokens, rows))
    return [x, x_scales, values, scales]


@pytest.mark.parametrize(
    ("tokens", "shape", "groups", "multiplies"),
    [
        (8, (64, 256), 1, 64),
        (64, (64, 256), 1, 64),
        (65, (64, 256), 1, 96),
        (96, (64, 256), 1, 96),
        (97, (64, 256), 1, 128),
        (256, (64, 256), 1, 256),
        (257, (64, 256), 1, "library"),
        (7, (64, 256), 1, "library"),
        (1, (64, 256), 1, "library"),
        (0, (64, 256), 1, "library"),
        (96, (64, 256), 2, "library"),
        (96, (80, 256), 1, "library"),
        (96, (64, 192), 1, "library"),
    ],
)
def test_a_kernel_multiplies_what_is_taken_and_the_library_all_else(monkeypatch, tokens, shape, groups, multiplies):
    multipliers = Multipliers(monkeypatch, *shape)
    operands = operands_of(tokens, *shape, groups)
    ours = ops.scaled_linear(*operands)
    assert multipliers.called == [multiplies]
    assert torch.equal(ours, ops.scaled_linear_reference(*operands))


def test_inputs_in_another_layout_than_the_kernels_are_copied(monkeypatch):
    multipliers = Multipliers(monkeypatch, 64, 256)
    x, x_scales, *weight = operands_of(20, 64, 512, groups=2)
    values, scales = weight[0][:, :256].contiguous(), weight[1][:, :1].contiguous()
    x, x_scales = x[:, 7:263], x_scales[:, :1]
    assert not x.is_contiguous() and not x_scales.is_contiguous()
    ours = ops.scaled_linear(x, x_scales, values, scales)
    assert torch.equal(ours, ops.scaled_linear_reference(x, x_scales, values, scales))
    of_x, of_scales, *_ = multipliers.operands
    assert of_x.is_contiguous() and of_scales.is_contiguous() and of_x.data_ptr() % 16 == 0


def test_a_weight_without_kernels_is_named(monkeypatch):
    monkeypatch.setattr(ops, "_LOADED", {})
    with pytest.raises(RuntimeError, match="no kernel is loaded for 64 x 256 in fp8 on cpu"):
        ops.scaled_linear(*operands_of(9, 64, 256))


def test_a_kernel_that_the_runtime_does_not_hold_is_named(driver, monkeypatch):
    driver()
    monkeypatch.setattr(ops, "_LOADED", {})
    with pytest.raises(ArtifactError, match="scaled_64x256_t64; compile"):
        family("scaled_linear").load(scaled_kernels(64, 256), {}, _GPU)


def test_an_error_of_loading_a_kernel_says_how_to_do_without(driver, monkeypatch):
    driver(fails="cuModuleLoadData")
    monkeypatch.setattr(ops, "_LOADED", {})
    binaries = {tiling.name: b"" for tiling in scaled_kernels(64, 256)}
    with pytest.raises(DeviceError, match=r"scaled_64x256_t64.*disable_passes: \[quantise_activations\]"):
        family("scaled_linear").load(scaled_kernels(64, 256), binaries, _GPU)


def test_a_launch_reads_the_boxes_of_its_tiling_and_the_scales(driver, monkeypatch):
    driver()
    monkeypatch.setattr(ops, "_LOADED", {})
    kernels = scaled_kernels(1024, 4096)
    family("scaled_linear").load(kernels, {tiling.name: b"binary" for tiling in kernels}, _GPU)
    assert ops._LOADED.keys() == {(0, 1024, 4096, tokens) for tokens in BUCKETS}
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(tensor_maps.TensorMaps, "get", lambda self, matrix, *boxes: asked.append(boxes))
    loaded = ops._LOADED[0, 1024, 4096, 96]
    launches: list[tuple[int, int, tuple[ctypes.c_void_p, ...]]] = []
    monkeypatch.setattr(loaded._loaded, "launch", lambda *arguments: launches.append(arguments))
    operands = operands_of(70, 1024, 4096)
    out = torch.empty(70, 1024, dtype=torch.bfloat16)
    loaded(*operands, out)
    assert (loaded.kernel.groups, loaded.kernel.token_tiles) == (1, 2)
    assert asked == [(tensor_maps.panels, 64, 1), (tensor_maps.rows, 40)]
    (blocks, threads, (_, _, *addresses, eps, tokens)), *_ = launches
    assert (blocks, threads) == (loaded.kernel.num_blocks, 256)
    read = [operands[1].data_ptr(), None, operands[3].data_ptr(), out.data_ptr(), None, None]
    assert [address.value for address in addresses] == read, "as wide.cu's arguments are in order"
    assert (eps.value, tokens.value) == (0, 70)


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_the_check_runs_each_kernel_with_as_many_tokens_as_it_holds_and_as_few(monkeypatch, factor):
    counts = []

    def multiply(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        counts.append(len(x))
        return factor * ops.scaled_linear_reference(x, *others)

    monkeypatch.setattr("mllm_compile.runtime.ops.op", lambda name: multiply)
    faults = list(family("scaled_linear").faults(scaled_kernels(64, 128), torch.device("cpu")))
    assert counts == [64, 8, 96, 65, 128, 97, 160, 129, 192, 161, 224, 193, 256, 225]
    assert [bucket_of(count) for count in counts[::2]] == [bucket_of(count) for count in counts[1::2]] == list(BUCKETS)
    assert len(faults) == (0 if factor == 1 else len(counts))
    assert all("scaled_64x128_t" in fault and "[quantise_activations]" in fault for fault in faults)


@given(KINDS, st.sampled_from(BUCKETS))
def test_a_block_has_64_kb_of_its_weight_on_its_way_until_x_is_there(kind, tokens):
    for tiling in ScaledTiling.all_of(kind, tokens):
        early = tiling.constants()["EARLY_STAGES"]
        assert 1 <= early <= tiling.weight_stages
        assert (early - 1) * tiling.weight_stage_bytes < 64 << 10, "and no more than the stage in which that ends"


@needs_nvcc
@pytest.mark.parametrize(
    ("rows", "columns", "tokens"), slow_but_a_sample([(24576, 4096, 256), (24576, 4096, 64), (1024, 4096, 96)], 1)
)
def test_the_source_compiles_without_spilling(tmp_path, rows, columns, tokens):
    source = kernel_source(choose(rows, columns, tokens))
    assert "k32.f32.e4m3.e4m3" in source
    check_compiles_without_spilling(source, tmp_path)
