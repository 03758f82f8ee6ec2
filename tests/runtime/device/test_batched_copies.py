"""Many copies in few calls of the driver: each is told once, whole and in order."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from mllm_compile.runtime.cuda.batched_copies import copy_batch
from mllm_compile.runtime.errors import DeviceError


@pytest.mark.parametrize("count", [1, 64, 130])
def test_every_copy_is_told_once(driver, count, monkeypatch):
    told: list[list[int]] = []

    def take(*arguments: Any) -> int:
        places, number, attributes, first, num_attributes, _, stream = arguments[:3], *arguments[3:]
        columns = [(ctypes.c_uint64 * number.value).from_address(place.value) for place in places]
        told.extend(zip(*columns, strict=True))
        assert (attributes._obj.flags, first._obj.value, num_attributes.value, stream.value) == (1, 0, 1, 77)
        return 0

    fake = driver()
    monkeypatch.setattr(fake, "cuMemcpyBatchAsync", take, raising=False)
    targets, sources, sizes = (np.arange(count, dtype=np.uint64) * 10 + first for first in (1, 2, 3))
    copy_batch(targets[::-1], sources, sizes, stream=77, device=0, at_once=64)
    assert told == list(zip(targets[::-1].tolist(), sources.tolist(), sizes.tolist(), strict=True))
    assert fake.calls.count("cuCtxPushCurrent_v2") == fake.calls.count("cuCtxPopCurrent_v2") == 1


def test_copies_that_the_driver_refuses_are_told(driver):
    fake, one = driver("cuMemcpyBatchAsync"), np.ones(1, dtype=np.uint64)
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_OF_A_TEST \(7\) to copies beside the steps"):
        copy_batch(one, one, one, stream=0, device=0)
    assert fake.calls[-2:] == ["cuGetErrorName", "cuCtxPopCurrent_v2"]
