"""Tiles of experts with many rows on Hopper, as far as it goes without one: what fits, what is stored, the source."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.errors import ArtifactError
from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, kernel_source
from mllm_compile.runtime.ops.expert_tiles import ops
from mllm_compile.runtime.ops.expert_tiles.kernel import ExpertTilesKernel, is_taken
from tests.runtime.compiled_source import check_compiles_without_spilling, needs_nvcc
from tests.sample import slow_but_a_sample

KERNELS = st.builds(
    ExpertTilesKernel,
    rows=st.integers(1, 300).map(lambda n: 64 * n),
    columns=st.integers(1, 128).map(lambda n: 64 * n),
    is_gated=st.booleans(),
)
UP, DOWN = ExpertTilesKernel(1536, 2048, True), ExpertTilesKernel(2048, 768, False)


@given(KERNELS)
def test_a_block_fits_a_multiprocessor_and_a_launch_all_of_them(kernel):
    assert kernel.shared_bytes <= 227 << 10
    assert kernel.stages >= 4
    assert kernel.num_blocks <= MULTIPROCESSORS and kernel.num_blocks % 2 == 0, "whole clusters"


@given(KERNELS)
def test_a_kernel_is_stored_with_all_that_its_launch_takes(kernel):
    data = json.loads(json.dumps(kernel.to_json()))
    assert ExpertTilesKernel.from_json(data) == kernel
    with pytest.raises(ValueError):
        ExpertTilesKernel.from_json(data | {"warps": 4})


def test_tiles_are_large_where_no_block_of_a_cluster_is_idle_for_it():
    assert (UP.tile_rows, DOWN.tile_rows) == (192, 128)
    assert ExpertTilesKernel(2880, 2880, False).tile_rows == 192


def test_kernels_have_names_of_their_own():
    assert len({kernel.name for kernel in (UP, DOWN, ExpertTilesKernel(1536, 2048, False))}) == 3


@pytest.mark.parametrize(
    ("outputs", "inputs", "taken"), [(768, 2048, True), (96, 64, True), (48, 64, False), (64, 96, False)]
)
def test_what_does_not_divide_is_left_alone(outputs, inputs, taken):
    assert is_taken(outputs, inputs) is taken


@needs_nvcc
@pytest.mark.parametrize(
    "kernel", slow_but_a_sample([UP, DOWN, ExpertTilesKernel(96, 512, False)], 1), ids=lambda kernel: kernel.name
)
def test_the_source_compiles_without_spilling(tmp_path, kernel):
    check_compiles_without_spilling(kernel_source(kernel), tmp_path)


def test_a_kernel_is_loaded_once_and_again_where_its_code_is_another(driver, monkeypatch):
    fake = driver()
    monkeypatch.setattr(ops, "_LOADED", {})
    for binary, count in ((b"first", 2), (b"first", 2), (b"second", 4)):
        ops.load_expert_tiles([UP, DOWN], {kernel.name: binary for kernel in (UP, DOWN)}, torch.device("cuda:0"))
        assert fake.calls.count("cuModuleLoadData") == count


def test_a_kernel_that_the_runtime_does_not_hold_is_named(driver):
    driver()
    with pytest.raises(ArtifactError, match="expert_tiles_2048x768; compile"):
        ops.load_expert_tiles([DOWN], {}, torch.device("cuda:0"))


def test_a_weight_without_a_kernel_is_named():
    weight = torch.zeros(2, 64, 128, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="no kernel is loaded for 64 x 128 on cpu"):
        ops.gated_expert_tiles(torch.zeros(256, 128, dtype=torch.bfloat16), weight, weight.int(), weight, 2)
