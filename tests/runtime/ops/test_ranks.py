"""Ops over ranks: what they give, what their fakes say, and that their kernels compile."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mllm_compile.kernels.nvrtc import compile_cuda, find_nvrtc
from mllm_compile.runtime.collectives.base import current, leaving_parts, left_parts
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from mllm_compile.runtime.collectives.sum_kernels import (
    CHUNK_BYTES,
    AddNormKernel,
    ChooseKernel,
    PushKernel,
    PushNormKernel,
    SendKernel,
    SendNormKernel,
    most_bytes,
)
from mllm_compile.runtime.cuda.kernel import kernel_source
from mllm_compile.runtime.ops import family, op


def parts(num_ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 4, generator=generator) for _ in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_sum_is_the_same_on_all_ranks(num_ranks):
    given = parts(num_ranks)
    sums = run_lockstep(num_ranks, lambda rank: op("all_reduce")(given[rank]))
    assert all(torch.equal(one, sums[0]) for one in sums)
    torch.testing.assert_close(sums[0], torch.stack(given).sum(0))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_gather_puts_ranks_one_behind_another(dim):
    given = parts(3)
    gathered = run_lockstep(3, lambda rank: op("all_gather")(given[rank], dim, 3))
    assert all(torch.equal(one, torch.cat(given, dim)) for one in gathered)
    with FakeTensorMode() as mode:
        assert op("all_gather")(mode.from_tensor(given[0]), dim, 3).shape == gathered[0].shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_choose_what_one_would_of_all_logits(num_ranks, dtype):
    whole = torch.randn(9, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole[1, [5, 11, 12, 23]] = 9.0  # of equals the lowest
    whole[2], whole[2, 13], whole[2, 19] = -1.0, 0.0, -0.0
    whole[3, :6], whole[4, 12:] = -torch.inf, -torch.inf
    whole[5, 20], whole[6, 3], whole[7], whole[8, 23] = torch.nan, torch.inf, -torch.inf, -torch.inf
    parts = whole.chunk(num_ranks, 1)
    found = run_lockstep(num_ranks, lambda rank: current().choose(parts[rank]))
    wanted = whole.argmax(1)
    wanted[5:8] = -1
    assert wanted[[1, 2]].tolist() == [5, 13]
    assert all(torch.equal(tokens, wanted) for tokens in found)


def test_parts_that_are_left_are_not_gathered():
    given = parts(2)

    def run(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with leaving_parts() as left:
            return op("all_gather")(given[rank], 2, 2), left

    for (whole, left), own in zip(run_lockstep(2, run), given, strict=True):
        assert whole.shape == (2, 3, 8)
        assert len(left) == 1
        assert torch.equal(left[0], own)
    assert left_parts() is None


def test_a_rank_knows_its_number():
    like = torch.zeros(3, dtype=torch.int64)
    assert [int(one) for one in run_lockstep(3, lambda rank: op("rank_index")(like))] == [0, 1, 2]


def test_an_op_outside_of_ranks_says_so():
    with pytest.raises(RuntimeError, match="outside of `with using"):
        op("all_reduce")(torch.zeros(2))


def test_the_first_error_of_a_rank_ends_all():
    def run(rank: int) -> None:
        if rank == 1:
            raise ValueError("no memory on rank 1")
        op("all_reduce")(torch.zeros(2))

    with pytest.raises(ValueError, match="no memory on rank 1"):
        run_lockstep(3, run)


NORMING = (PushNormKernel, SendNormKernel, AddNormKernel)
KERNELS = [
    PushKernel(),
    SendKernel(),
    *(ChooseKernel(columns) for columns in (75_968, 25_129)),
    *(kind(columns) for kind in NORMING for columns in (192, 4096, 8192)),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_survives_json(kernel):
    assert family("ranks").from_json(kernel.to_json()) == kernel


def test_the_largest_sum_is_of_whole_chunks_and_threads_are_whole_warps():
    assert all(most_bytes(count) % CHUNK_BYTES == 0 for count in range(2, 9))
    assert [PushKernel().num_blocks(chunks) for chunks in (1, 512, 513, 1 << 20)] == [1, 1, 2, 132]
    assert [PushNormKernel(columns).num_threads for columns in (8, 192, 4096, 5120, 8192)] == [32, 32, 512, 640, 512]


@pytest.mark.parametrize("columns", [8, 192, 1000, 4096, 5120, 8192, 16384])
def test_rows_are_sent_whole_and_a_block_has_threads_that_send_beside_those_that_add(columns):
    kernel = SendNormKernel(columns)
    assert kernel.group_bytes % (2 * columns) == 0
    assert kernel.num_threads == kernel.constants()["THREADS"] + kernel.constants()["SENDERS"] <= 1024
    assert kernel.constants()["THREADS"] == PushNormKernel(columns).num_threads


def test_a_sum_with_residual_and_norm_matches_its_parts():
    given = parts(2)
    residual, weight = parts(1)[0] * 3, torch.linspace(0.5, 2, 4)
    found = run_lockstep(2, lambda rank: op("all_reduce_residual_norm")(given[rank], residual, weight, 1e-6))
    wanted = residual + given[0] + given[1]
    for summed, normed in found:
        torch.testing.assert_close(summed, wanted)
        torch.testing.assert_close(normed, torch.nn.functional.rms_norm(wanted, (4,), weight, 1e-6))


def test_every_logit_of_a_rank_has_a_thread():
    assert [ChooseKernel(columns).num_blocks(3) for columns in (1, 8192, 8193, 75_968)] == [3, 3, 6, 30]


@pytest.mark.skipif(find_nvrtc() is None, reason="takes NVRTC")
@pytest.mark.parametrize("kernel", KERNELS[:-1], ids=lambda kernel: kernel.name)
def test_a_kernel_compiles(kernel):
    assert compile_cuda(kernel_source(kernel), kernel.name, "sm_90a")


def test_parts_of_a_sum_match_the_ranks():
    given = [torch.cat((part, part + 1)) for part in parts(2)]
    found = run_lockstep(2, lambda rank: op("reduce_scatter")(given[rank], 2))
    torch.testing.assert_close(torch.cat(found), torch.stack(given).sum(0))
    with FakeTensorMode() as mode:
        assert op("reduce_scatter")(mode.from_tensor(given[0]), 2).shape == found[0].shape
