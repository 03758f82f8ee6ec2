"""The decode kernel of clusters, as far as it goes without a GPU: how it is divided, launched, and its source."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess

import pytest
import torch

from mllm_compile.errors import ArtifactError
from mllm_compile.runtime.cluster_decode import decoder
from mllm_compile.runtime.cluster_decode.shapes import SPLITS, choose_split, cluster_kernels, is_served
from mllm_compile.runtime.cuda.source import kernel_source

_MULTIPROCESSOR_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10


@pytest.mark.parametrize(("num_sequences", "split"), [(8, 8), (16, 8), (17, 4), (32, 4), (33, 2), (64, 2), (1000, 2)])
def test_few_sequences_have_more_blocks_each(num_sequences, split):
    assert choose_split(num_sequences) == split


@pytest.mark.parametrize(("page_size", "is_right"), [(8, False), (16, True), (48, False), (64, True), (128, True)])
def test_a_tile_is_of_whole_pages_or_a_page_of_whole_tiles(page_size, is_right):
    assert is_served(32, 8, 128, page_size) is is_right


@pytest.mark.parametrize("group", [1, 2, 4])
def test_two_blocks_fit_on_a_multiprocessor(group):
    for kernel in cluster_kernels(8 * group, 8, 64):
        assert 2 * (kernel.shared_bytes + _RESERVED_BYTES) <= _MULTIPROCESSOR_BYTES


def test_names_tell_kernels_apart():
    kernels = [*cluster_kernels(16, 8, 64), *cluster_kernels(32, 8, 64), *cluster_kernels(32, 8, 16)]
    assert len({kernel.name for kernel in kernels}) == len(kernels) == 3 * len(SPLITS)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_the_source_compiles_without_spilling(tmp_path, group, page_size):
    kernel = cluster_kernels(8 * group, 8, page_size)[-1]
    (tmp_path / "kernel.cu").write_text(kernel_source(kernel))
    command = ["nvcc", "-cubin", "-arch=sm_90a", "-Xptxas", "-v", "kernel.cu", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes spill stores", done.stderr) == ["0"]
    assert "warning" not in done.stderr


class FakeKernel:
    def __init__(self, name: str) -> None:
        self.name = name
        self.launches: list[tuple[int, int, int]] = []

    def launch(self, num_blocks, num_threads, arguments) -> None:
        self.launches.append((num_blocks, num_threads, len(arguments)))


class FakeMaps:
    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def get(self, matrix: torch.Tensor, box_rows: int):
        self.asked.append((tuple(matrix.shape), box_rows))
        return type("Map", (), {"address": 64})


def test_a_batch_runs_the_kernel_of_its_split_on_the_caches_rows(monkeypatch):
    made: dict[str, FakeKernel] = {}

    def load(kernel, binaries):
        assert binaries[kernel.name] == b"binary"
        made[kernel.name] = FakeKernel(kernel.name)
        return made[kernel.name]

    monkeypatch.setattr(decoder, "load_kernel", load)
    monkeypatch.setattr(decoder, "TensorMaps", FakeMaps)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    kernels = cluster_kernels(32, 8, 16)
    decode = decoder.ClusterDecode(kernels, {kernel.name: b"binary" for kernel in kernels}, 0.1, torch.device("cuda:0"))
    keys = torch.zeros(160, 8, 128, dtype=torch.bfloat16)
    table, lens = torch.zeros(3, 10, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    q = torch.zeros(3, 32, 128, dtype=torch.bfloat16)
    decode([q, keys, keys, table, lens, torch.empty_like(q), *[torch.empty(0)] * 4])
    assert {name: kernel.launches for name, kernel in made.items() if kernel.launches} == {
        "decode_8x4_page16_split4": [(3 * 8 * 4, 128, 8)]
    }
    assert decode._maps.asked == [((160, 1024), 16)] * 2


def test_what_has_too_few_blocks_is_left_to_another_where_there_is_one(monkeypatch):
    monkeypatch.setattr(decoder, "load_kernel", lambda kernel, binaries: FakeKernel(kernel.name))
    monkeypatch.setattr(decoder, "TensorMaps", FakeMaps)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    left: list[int] = []
    decode = decoder.ClusterDecode(
        cluster_kernels(32, 8, 16), {}, 0.1, torch.device("cuda:0"), lambda inputs: left.append(inputs[0].shape[0])
    )
    keys, lens = torch.zeros(160, 8, 128, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int32)
    for count in (1, 2):
        q = torch.zeros(count, 32, 128, dtype=torch.bfloat16)
        decode([q, keys, keys, torch.zeros(count, 10, dtype=torch.int32), lens[:count], torch.empty_like(q)])
    assert left == [1]


def test_a_kernel_that_the_runtime_does_not_hold_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with pytest.raises(ArtifactError, match="decode_8x4_page64_split2; compile"):
        decoder.ClusterDecode(cluster_kernels(32, 8, 64), {}, 0.1, torch.device("cuda:0"))
