"""Weights through the pinned ring; how fast is tests/benchmarks/bench_gpu.py's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mllm_compile.runtime.weights.safetensors_header import read_header
from mllm_compile.runtime.weights.stream import TensorRead, stream_tensors
from mllm_compile.runtime.weights.sums import weight_sums

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def reads_into(path: Path, places: dict[str, torch.Tensor]) -> list[TensorRead]:
    tensors = read_header(path).tensors
    return [TensorRead(path, tensors[name], place) for name, place in places.items()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_arrive_and_are_converted_on_the_device(tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(1000 + i, 517, generator=generator).bfloat16() for i in range(6)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    places = {name: torch.empty(value.shape, dtype=dtype, device="cuda") for name, value in tensors.items()}
    stream_tensors(reads_into(path, places), chunk_bytes=100_000)
    for name, value in tensors.items():
        assert torch.equal(places[name].cpu(), value.to(dtype)), name


@pytest.mark.parametrize("size", [1, 65_539, 100 << 20])
def test_a_gpu_sums_bytes_as_a_cpu_does(size):
    weight = (torch.arange(size) * 37 % 251).to(torch.uint8)
    assert weight_sums({"weight": weight.cuda()}) == weight_sums({"weight": weight})
