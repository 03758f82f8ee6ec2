"""Calls of the CUDA driver, without one: kernels in torch's context, and maps of matrices for TMA."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.errors import DeviceError
from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import Kernel, TensorMap, scatter_pinned
from mllm_compile.runtime.cuda.tensor_maps import TensorMaps


def test_a_kernel_is_loaded_into_torchs_context_whatever_the_thread(driver):
    fake = driver()
    Kernel(b"", "name", 1 << 16)
    assert fake.calls.index("cuDevicePrimaryCtxRetain") < fake.calls.index("cuCtxSetCurrent")
    assert fake.calls.index("cuCtxSetCurrent") < fake.calls.index("cuModuleLoadData")


@pytest.mark.parametrize("call", ["cuCtxSetCurrent", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_what_the_driver_refuses_is_named(driver, call):
    driver(fails=call)
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_OF_A_TEST \(7\)"):
        Kernel(b"", "name", 1 << 16)


def test_stretches_of_pinned_memory_go_where_each_is_wanted(driver):
    fake = driver()
    copies: list[tuple[int, int, int, int]] = []
    fake.cuMemcpyHtoDAsync_v2 = lambda *arguments: copies.append(tuple(one.value or 0 for one in arguments)) or 0
    memory = torch.zeros(100, dtype=torch.uint8)
    scatter_pinned(memory, [(5000, 10), (7000, 30)], 9, 0)
    first = memory.data_ptr()
    assert copies == [(5000, first, 10, 9), (7000, first + 10, 30, 9)]
    driver(fails="cuMemcpyHtoDAsync_v2")
    with pytest.raises(DeviceError, match="a copy of 10 bytes to the device"):
        scatter_pinned(memory, [(5000, 10)], 9, 0)


@pytest.mark.parametrize(
    ("boxes", "of", "sizes", "strides", "box"),
    [
        (tensor_maps.rows, (16,), [1024, 160], [2048], [64, 16]),
        (tensor_maps.panels, (16, 16), [64, 160, 16], [2048, 128], [64, 16, 16]),
        (tensor_maps.halves, (16, 2), [64, 8, 2, 10, 16], [2048, 80 * 2048, 8 * 2048, 128], [64, 8, 2, 1, 2]),
        (tensor_maps.spread_halves, (), [1024, 2, 10, 2, 4], [2048, 16384, 80 * 2048, 4096], [64, 2, 4, 2, 4]),
    ],
)
def test_a_map_is_of_rows_or_of_panels_of_64_columns(monkeypatch, boxes, of, sizes, strides, box):
    given: list[list[int]] = []

    class Driver:
        def cuTensorMapEncodeTiled(self, *arguments) -> int:
            rank = arguments[2]
            assert rank == len(arguments[4])
            given.extend(list(arguments[index]) for index in (4, 5, 6))
            return 0

    monkeypatch.setattr("mllm_compile.runtime.cuda.driver._driver", Driver)
    matrix = torch.zeros(160, 1024, dtype=torch.bfloat16)
    TensorMap(matrix, boxes(matrix, *of))
    assert given == [sizes, strides, box]


def test_maps_of_other_boxes_are_others(driver):
    driver()
    maps, matrix = TensorMaps(), torch.zeros(160, 1024, dtype=torch.bfloat16)
    rows, panels, halves = tensor_maps.rows, tensor_maps.panels, tensor_maps.halves
    wanted = [(rows, 16), (panels, 16, 16), (rows, 32), (halves, 16, 16)]
    made = [maps.get(matrix, *boxes) for boxes in wanted]
    assert len({id(one) for one in made}) == 4
    assert maps.get(matrix, panels, 16, 16) is made[1]


def test_a_lane_has_eight_neighbours_of_what_is_spread():
    """Box by box as TMA takes it: the rows of gates and ups that come to be under a lane's sums."""
    matrix = torch.zeros(256, 64, dtype=torch.bfloat16)
    _, *axes = tensor_maps.spread_halves(matrix)
    for first in (0, 4):  # the 32 rows of a half that begin at 8 * first
        starts = (0, first, 0, 0)
        rows = torch.zeros(1, dtype=torch.long)
        for axis, start in zip(axes, starts, strict=True):  # the last one is the slowest
            steps = (start + torch.arange(axis.box)) * (axis.stride // 128)
            rows = (steps[:, None] + rows).flatten()
        of_lane = rows.view(4, 2, 4, 2).permute(2, 1, 0, 3).reshape(4, 2, 8)  # eight, half, lane, neighbour
        for lane in range(4):
            neighbours = 8 * first + 8 * lane + torch.arange(8)
            assert of_lane[lane].tolist() == [neighbours.tolist(), (128 + neighbours).tolist()]


def rows_of_box(axes: tensor_maps.Axes, starts: tuple[int, ...]) -> torch.Tensor:
    """The rows of 128 bytes that a copy brings, in their order in shared memory."""
    rows = torch.zeros(1, dtype=torch.long)
    for axis, start in zip(axes, starts, strict=True):
        rows = ((start + torch.arange(axis.box))[:, None] * (axis.stride // 128) + rows).flatten()
    return rows


def test_a_lane_has_eight_neighbours_of_an_experts_rows():
    """Of both copies that begin at 32 outputs of the second of three experts."""
    weights = torch.zeros(3, 256, 64, dtype=torch.bfloat16)
    _, *halves = tensor_maps.expert_halves(weights)
    _, *plain = tensor_maps.expert_rows(weights)
    first = 256 + 32
    gates_and_ups = rows_of_box(halves, (0, first // 8, 0, 0)).view(4, 2, 4, 2).permute(2, 1, 0, 3).reshape(4, 2, 8)
    rows = rows_of_box(plain, (0, 0, 0, first // 32)).view(2, 4, 4, 2).permute(2, 0, 1, 3).reshape(4, 2, 8)
    for lane in range(4):
        neighbours = first + 8 * lane + torch.arange(8)
        assert gates_and_ups[lane].tolist() == [neighbours.tolist(), (128 + neighbours).tolist()]
        assert rows[lane].tolist() == [neighbours.tolist(), (32 + neighbours).tolist()]
