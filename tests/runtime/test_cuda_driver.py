"""What is asked of the CUDA driver, without one: kernels in torch's context, and maps of matrices for TMA."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.errors import DeviceError
from mllm_compile.runtime.cuda.driver import Kernel, TensorMap, TensorMaps


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


@pytest.mark.parametrize(
    ("box_panels", "are_halves", "sizes", "strides", "box"),
    [
        (None, False, [1024, 160], [2048], [64, 16]),
        (16, False, [64, 160, 16], [2048, 128], [64, 16, 16]),
        (2, True, [64, 8, 2, 10, 16], [2048, 80 * 2048, 8 * 2048, 128], [64, 8, 2, 1, 2]),
    ],
)
def test_a_map_is_of_rows_or_of_panels_of_64_columns(monkeypatch, box_panels, are_halves, sizes, strides, box):
    given: list[list[int]] = []

    class Driver:
        def cuTensorMapEncodeTiled(self, *arguments) -> int:
            rank = arguments[2]
            assert rank == len(arguments[4])
            given.extend(list(arguments[index]) for index in (4, 5, 6))
            return 0

    monkeypatch.setattr("mllm_compile.runtime.cuda.driver._driver", Driver)
    TensorMap(torch.zeros(160, 1024, dtype=torch.bfloat16), 16, box_panels, are_halves)
    assert given == [sizes, strides, box]


def test_maps_of_other_boxes_are_others(driver):
    driver()
    maps, matrix = TensorMaps(), torch.zeros(160, 1024, dtype=torch.bfloat16)
    made = [maps.get(matrix, 16), maps.get(matrix, 16, 16), maps.get(matrix, 32), maps.get(matrix, 16, 16, True)]
    assert len({id(one) for one in made}) == 4
    assert maps.get(matrix, 16, 16) is made[1]
