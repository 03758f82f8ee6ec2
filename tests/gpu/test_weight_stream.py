"""Weights through the pinned ring; how fast is benchmarks/server/load_speed.py's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mllm_compile.runtime.weights.header import read_header
from mllm_compile.runtime.weights.stream import StraightRead, TensorRead, stream_tensors
from mllm_compile.runtime.weights.sums import weight_sums

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def reads_into(path: Path, places: dict[str, torch.Tensor]) -> list[TensorRead]:
    tensors = read_header(path).tensors
    reads = [TensorRead(path, tensors[name], place) for name, place in places.items()]
    return sorted(reads, key=lambda read: read.entry.begin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_arrive_and_are_converted_on_the_device(tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(1000 + i, 517, generator=generator).bfloat16() for i in range(6)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    places = {name: torch.empty(value.shape, dtype=dtype, device="cuda") for name, value in tensors.items()}
    stream_tensors(reads_into(path, places), places["w0"].device, chunk_bytes=100_000)
    for name, value in tensors.items():
        assert torch.equal(places[name].cpu(), value.to(dtype)), name


def test_stretches_of_many_sizes_come_to_their_places(tmp_path):
    """Larger and smaller than a chunk, in another order than in the file, from many rounds of the ring."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 40_000, (600,), generator=generator).tolist()
    content = torch.randint(0, 256, (sum(sizes),), generator=generator, dtype=torch.uint8)
    path = tmp_path / "bytes"
    path.write_bytes(content.numpy().tobytes())
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device="cuda")
    reads, begin = [], 0
    for size in sizes:
        reads.append(StraightRead(path, begin, size, memory, sum(sizes) - begin - size))
        begin += size
    for _ in range(3):
        memory.zero_()
        stream_tensors(reads, memory.device, chunk_bytes=30_000)
        expected = torch.cat(content.split(sizes)[::-1])
        assert torch.equal(memory.cpu(), expected)


@pytest.mark.parametrize("size", [1, 65_539, 100 << 20])
def test_a_gpu_sums_bytes_as_a_cpu_does(size):
    weight = (torch.arange(size) * 37 % 251).to(torch.uint8)
    assert weight_sums({"weight": weight.cuda()}) == weight_sums({"weight": weight})
