"""Sums over ranks with residual and norm, by kernels of whole rows, with two ranks on one GPU, against float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mllm_compile.kernels.cuda import can_compile_kernels
from mllm_compile.kernels.nvrtc import compile_cuda
from mllm_compile.runtime.collectives import base
from mllm_compile.runtime.collectives.copied import CopiedSums, copied_bytes
from mllm_compile.runtime.collectives.push import (
    NOTHING,
    PushedSums,
    SentSums,
    add_and_norm,
    buffer_bytes,
    load_ranks_kernel,
    sent_bytes,
)
from mllm_compile.runtime.collectives.sum_kernels import (
    CALLS_AROUND,
    AddNormKernel,
    PushKernel,
    PushNormKernel,
    SendKernel,
    SendNormKernel,
    most_bytes,
    most_sent_bytes,
)
from mllm_compile.runtime.cuda.kernel import kernel_source
from mllm_compile.runtime.ops import family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="takes a Hopper GPU and NVRTC"
    ),
]

DEVICE = torch.device("cuda", 0)
WIDTHS = (4096, 5120, 8192, 1000)
EPS = 1e-6
BLOCKS = 16  # of a rank: both share the GPU, and all blocks of both have to run at once
NORMING = (PushNormKernel, SendNormKernel, AddNormKernel)
KERNELS = [PushKernel(), SendKernel(), *(kind(width) for kind in NORMING for width in WIDTHS)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    for kernel in KERNELS:
        binary = compile_cuda(kernel_source(kernel), kernel.name, "sm_90a")
        load_ranks_kernel(kernel, {kernel.name: binary}, DEVICE)


class Pair:
    """Two ranks on one GPU, on two streams, that push, send or copy; `most` is what their kind is told last."""

    def __init__(self, kind: Any, num_bytes: int, word: int, most: int = BLOCKS) -> None:
        self.memory = [torch.full((num_bytes // 4,), word, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        places = [one.data_ptr() for one in self.memory]
        self.ranks = [kind(rank, places, DEVICE, most) for rank in range(2)]
        self.streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]
        torch.cuda.synchronize()

    def run(self, call: Callable[[int, Any], Any]) -> list[Any]:
        torch.cuda.synchronize()
        found = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                found.append(call(rank, self.ranks[rank]))
        torch.cuda.synchronize()
        return found


@pytest.fixture(params=["push", "send"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "push":
        pair = Pair(PushedSums, buffer_bytes(2), NOTHING - (1 << 32))
    else:
        pair = Pair(SentSums, sent_bytes(2), 0)
    yield pair
    for rank in pair.ranks:
        rank.give_up()
    torch.cuda.synchronize()


def inputs(rows: int, width: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The parts of both ranks, the residual, and the norm's weight."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    made = [torch.randn(rows, width, generator=generator, device=DEVICE).bfloat16() for _ in range(3)]
    weight = (1 + 0.1 * torch.randn(width, generator=generator, device=DEVICE)).bfloat16()
    return made[:2], made[2], weight


def errors(found: tuple[torch.Tensor, torch.Tensor], parts: Any, residual: Any, weight: Any) -> list[float]:
    """Largest differences of the sum and of the norm from float32."""
    total = residual.float() + parts[0].float() + parts[1].float()
    normed = weight.float() * total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    return [float((one.float() - wanted).abs().mean()) for one, wanted in zip(found, (total, normed), strict=True)]


@pytest.mark.parametrize("calls", [1 << 31, CALLS_AROUND - 3])
def test_sums_are_right_however_many_there_were(pair, calls):
    for rank in pair.ranks:
        rank._state[0] = calls - (1 << 32)  # int32
    for seed, rows in enumerate((8, 200, 8, 1, 64, 8, 200)):
        parts, residual, weight = inputs(rows, 4096, seed)
        found = pair.run(lambda rank, one: one.sum_and_norm(parts[rank], residual, weight, EPS))  # noqa: B023
        wanted = (residual.float() + (parts[0].float() + parts[1].float())).bfloat16()
        assert all(torch.equal(summed, wanted) for summed, _ in found), seed


def test_rows_of_counts_that_change_are_as_near_to_float32_as_torch_is(pair):
    for width in WIDTHS:
        for seed, rows in enumerate((1, 8, 1, 3, 64, 200, 1, 33, 64, 2)):
            parts, residual, weight = inputs(rows, width, seed)
            assert pair.ranks[0].takes(parts[0])
            ours, theirs = pair.run(lambda rank, one: one.sum_and_norm(parts[rank], residual, weight, EPS))  # noqa: B023
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), (width, rows)
            plain = base.add_and_norm(parts[0] + parts[1], residual, weight, EPS)
            limits = errors(plain, parts, residual, weight)
            for error, limit in zip(errors(ours, parts, residual, weight), limits, strict=True):
                assert error <= 1.2 * limit, (width, rows)


def test_copied_sums_take_turns_in_their_buffers_without_a_wait_of_the_host():
    most = 4 << 20
    pair = Pair(CopiedSums, copied_bytes(2, most), 0, most)
    for width in WIDTHS:
        given = [inputs(rows, width, seed) for seed, rows in enumerate((1, 200, 8, 130, 200, 3, 64))]
        assert all(pair.ranks[0].takes(parts[0]) for parts, _, _ in given)

        def sums(rank: int, one: CopiedSums) -> list[Any]:
            return [one.sum_and_norm(parts[rank], residual, weight, EPS) for parts, residual, weight in given]  # noqa: B023

        for one, other, (parts, residual, weight) in zip(*pair.run(sums), given, strict=True):
            assert torch.equal(one[0], (residual.float() + (parts[0].float() + parts[1].float())).bfloat16())
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
            limits = errors(base.add_and_norm(parts[0] + parts[1], residual, weight, EPS), parts, residual, weight)
            assert errors(one, parts, residual, weight)[1] <= 1.2 * limits[1]


def test_a_copied_sum_does_not_wait_for_a_rank_that_was_given_up():
    pair = Pair(CopiedSums, copied_bytes(2, 1 << 20), 0, 1 << 20)
    parts, residual, weight = inputs(8, 4096, 0)
    with torch.cuda.stream(pair.streams[0]):
        pair.ranks[0].sum_and_norm(parts[0], residual, weight, EPS)
    assert not pair.streams[0].query()
    pair.ranks[0].give_up()
    pair.streams[0].synchronize()


def test_a_sum_that_was_made_otherwise_is_added_and_normed():
    for width in WIDTHS:
        for rows in (1, 300, 5000):
            parts, residual, weight = inputs(rows, width, rows)
            total = parts[0] + parts[1]
            found = add_and_norm(total, residual, weight, EPS)
            plain = base.add_and_norm(total, residual, weight, EPS)
            assert torch.equal(found[0], plain[0])
            limits = errors(plain, parts, residual, weight)
            assert errors(found, parts, residual, weight)[1] <= 1.2 * limits[1]


def test_sums_with_and_without_norm_take_turns(pair):
    for seed, rows in enumerate((8, 1, 64, 2, 2, 64, 1)):
        parts, residual, weight = inputs(rows, 4096, seed)
        ours, theirs = pair.run(lambda rank, one: one.sum(parts[rank]))  # noqa: B023
        wanted = (parts[0].float() + parts[1].float()).bfloat16()
        assert torch.equal(ours, wanted)
        assert torch.equal(theirs, wanted)
        ours, theirs = pair.run(lambda rank, one: one.sum_and_norm(parts[rank], residual, weight, EPS))  # noqa: B023
        assert torch.equal(ours[0], (residual.float() + (parts[0].float() + parts[1].float())).bfloat16())
        assert torch.equal(ours[1], theirs[1])


def test_captured_sums_are_new_sums_at_each_replay(pair):
    parts, residual, weight = inputs(40, 4096, 0)
    graphs, outputs = [], []
    for rank, one, stream in zip(range(2), pair.ranks, pair.streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs.append([one.sum_and_norm(parts[rank], residual, weight, EPS) for _ in range(5)])
        graphs.append(graph)
    for seed in range(1, 4):
        for part, value in zip(parts, inputs(40, 4096, seed)[0], strict=True):
            part.copy_(value)
        pair.run(lambda rank, one: graphs[rank].replay())
        wanted = (residual.float() + (parts[0].float() + parts[1].float())).bfloat16()
        assert all(torch.equal(summed, wanted) for of_rank in outputs for summed, _ in of_rank)


def test_a_rank_that_is_alone_ends_when_it_is_told_so(pair):
    parts, residual, weight = inputs(40, 4096, 0)
    with torch.cuda.stream(pair.streams[0]):
        pair.ranks[0].sum_and_norm(parts[0], residual, weight, EPS)
    assert not pair.streams[0].query()
    pair.ranks[0].give_up()
    torch.cuda.synchronize()


def test_what_is_too_large_is_not_pushed():
    pair = Pair(PushedSums, buffer_bytes(2), NOTHING - (1 << 32))
    rows = most_bytes(2) // (4096 * 2)
    assert pair.ranks[0].takes(torch.empty(rows, 4096, dtype=torch.bfloat16, device=DEVICE))
    assert not pair.ranks[0].takes(torch.empty(rows + 1, 4096, dtype=torch.bfloat16, device=DEVICE))


def test_many_rows_are_sent_group_by_group_and_in_parts():
    pair = Pair(SentSums, sent_bytes(2), 0)
    most_rows = most_sent_bytes(2) // (4096 * 2)
    for seed, (rows, width) in enumerate(
        ((8191, 4096), (1001, 8192), (4097, 1000), (most_rows + 5, 4096), (2049, 5120)) * 2
    ):
        parts, residual, weight = inputs(rows, width, seed)
        assert pair.ranks[0].takes(parts[0])
        ours, theirs = pair.run(lambda rank, one: one.sum_and_norm(parts[rank], residual, weight, EPS))  # noqa: B023
        assert torch.equal(ours[0], (residual.float() + (parts[0].float() + parts[1].float())).bfloat16()), (
            rows,
            width,
        )
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), (rows, width)
        limits = errors(base.add_and_norm(parts[0] + parts[1], residual, weight, EPS), parts, residual, weight)
        assert errors(ours, parts, residual, weight)[1] <= 1.2 * limits[1]
        ours, theirs = pair.run(lambda rank, one: one.sum(parts[rank]))  # noqa: B023
        assert torch.equal(ours, (parts[0].float() + parts[1].float()).bfloat16())
        assert torch.equal(ours, theirs)


def test_the_family_finds_no_fault():
    assert list(family("ranks").faults(KERNELS, DEVICE)) == []
