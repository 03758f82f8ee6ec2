"""The kernel of small sums over ranks, with two ranks on one GPU: sums, sizes that change, captures, and giving up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mllm_compile.kernels.cuda import can_compile_kernels
from mllm_compile.kernels.nvrtc import compile_cuda
from mllm_compile.runtime.collectives.push import NOTHING, PushedSums, buffer_bytes, load_ranks_kernel
from mllm_compile.runtime.collectives.sum_kernels import PushKernel, most_bytes
from mllm_compile.runtime.cuda.kernel import kernel_source
from mllm_compile.runtime.ops import family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="takes a Hopper GPU and NVRTC"
    ),
]

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def kernel() -> PushKernel:
    kernel = PushKernel()
    load_ranks_kernel(kernel, {kernel.name: compile_cuda(kernel_source(kernel), kernel.name, "sm_90a")}, DEVICE)
    return kernel


class Pair:
    """Two ranks on one GPU, on two streams."""

    def __init__(self) -> None:
        num_words = buffer_bytes(2) // 4
        self.buffers = [
            torch.full((num_words,), NOTHING - (1 << 32), dtype=torch.int32, device=DEVICE) for _ in range(2)
        ]
        self.ranks = [PushedSums(rank, [one.data_ptr() for one in self.buffers], DEVICE) for rank in range(2)]
        self.streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]
        torch.cuda.synchronize()

    def sum(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        sums = []
        for rank, part, stream in zip(self.ranks, parts, self.streams, strict=True):
            with torch.cuda.stream(stream):
                sums.append(rank.sum(part))
        torch.cuda.synchronize()
        return sums


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for rank in pair.ranks:
        rank.give_up()
    torch.cuda.synchronize()


def random_parts(size: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    parts = [torch.randn(size, generator=generator, device=DEVICE).bfloat16() for _ in range(2)]
    torch.cuda.synchronize()
    return parts


def test_sums_of_sizes_that_change_are_right_and_the_same_on_both(pair):
    for seed, size in enumerate((8, 4096, 8, 8, 32768, 524288, 2097152, 8, 4096, 524288, 8)):
        parts = random_parts(size, seed)
        assert pair.ranks[0].takes(parts[0])
        ours, theirs = pair.sum(parts)
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, (parts[0].float() + parts[1].float()).bfloat16()), size


def test_negative_zeros_nan_and_infinity_come_across(pair):
    odd = torch.tensor([-0.0, -0.0, float("nan"), float("inf"), -1.0, 0.0, -0.0, 1.0], device=DEVICE).bfloat16()
    torch.cuda.synchronize()
    ours, theirs = pair.sum([odd, odd])
    torch.testing.assert_close(ours, odd + odd, equal_nan=True)
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_captured_sums_are_new_sums_at_each_replay(pair):
    parts = random_parts(4096, 0)
    graphs, outputs = [], []
    for rank, part, stream in zip(pair.ranks, parts, pair.streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs.append([rank.sum(part) for _ in range(5)])
        graphs.append(graph)
    for seed in range(1, 4):
        for part, value in zip(parts, random_parts(4096, seed), strict=True):
            part.copy_(value)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, pair.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        wanted = (parts[0].float() + parts[1].float()).bfloat16()
        assert all(torch.equal(one, wanted) for of_rank in outputs for one in of_rank)


def test_a_rank_that_is_alone_ends_when_it_is_told_so(pair):
    part = random_parts(4096, 0)[0]
    with torch.cuda.stream(pair.streams[0]):
        pair.ranks[0].sum(part)
    assert not pair.streams[0].query()
    pair.ranks[0].give_up()
    torch.cuda.synchronize()


def test_what_is_too_large_or_not_whole_is_not_taken(pair):
    rank = pair.ranks[0]
    assert not rank.takes(torch.zeros(most_bytes(2) // 2 + 8, dtype=torch.bfloat16, device=DEVICE))
    assert not rank.takes(torch.zeros(7, dtype=torch.bfloat16, device=DEVICE))
    assert not rank.takes(torch.zeros(8, dtype=torch.float32, device=DEVICE))


def test_the_family_finds_no_fault(kernel):
    assert list(family("ranks").faults([kernel], DEVICE)) == []
