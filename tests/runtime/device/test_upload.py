"""Arrays come to the device as they were, though the host changes them and goes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mllm_compile.runtime.device import upload
from mllm_compile.runtime.device.upload import RowUploads

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part_bytes", [1, 200, 4 << 20])
def test_rows_hold_the_arrays_one_after_another(monkeypatch, device, part_bytes):
    monkeypatch.setattr(upload, "_PART_BYTES", part_bytes)
    uploads = RowUploads(torch.device(device))
    generator = np.random.default_rng(0)
    for _ in range(3):  # memory that is used again
        arrays = [generator.standard_normal((count, 12), np.float32) for count in (7, 1, 30)]
        expected = torch.from_numpy(np.concatenate(arrays)).to(torch.bfloat16)
        rows = uploads(arrays, torch.bfloat16)
        for array in arrays:
            array[:] = np.nan
        assert torch.equal(rows.cpu(), expected)
