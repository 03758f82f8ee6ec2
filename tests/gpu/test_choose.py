"""The kernel that chooses tokens over ranks, with three ranks on one GPU: tokens, captures, and giving up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mllm_compile.kernels.cuda import can_compile_kernels
from mllm_compile.kernels.nvrtc import compile_cuda
from mllm_compile.runtime.collectives.choose import HandOn, TokenChoice, choice_bytes
from mllm_compile.runtime.collectives.push import load_ranks_kernel
from mllm_compile.runtime.collectives.sum_kernels import CALLS_AROUND, ChooseKernel, PushKernel
from mllm_compile.runtime.cuda.kernel import kernel_source
from mllm_compile.runtime.ops import family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="takes a Hopper GPU and NVRTC"
    ),
]

DEVICE = torch.device("cuda", 0)
COLUMNS = (75_968, 25_129, 40)  # of whole chunks and not, and fewer than a block reads
NUM_RANKS = 3


@pytest.fixture(scope="module", autouse=True)
def kernels() -> list[ChooseKernel]:
    kernels = [ChooseKernel(columns) for columns in COLUMNS]
    for kernel in (PushKernel(), *kernels):
        load_ranks_kernel(kernel, {kernel.name: compile_cuda(kernel_source(kernel), kernel.name, "sm_90a")}, DEVICE)
    return kernels


class Group:
    """Ranks on one GPU, each on its stream."""

    def __init__(self) -> None:
        words = choice_bytes(NUM_RANKS) // 8
        self.memory = [torch.zeros(words, dtype=torch.int64, device=DEVICE) for _ in range(NUM_RANKS)]
        places = [one.data_ptr() for one in self.memory]
        self.ranks = [TokenChoice(rank, places, DEVICE) for rank in range(NUM_RANKS)]
        self.streams = [torch.cuda.Stream(DEVICE) for _ in range(NUM_RANKS)]
        torch.cuda.synchronize()

    def choose(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        torch.cuda.synchronize()
        assert all(rank.takes(part) for rank, part in zip(self.ranks, parts, strict=True))
        tokens = []
        for rank, part, stream in zip(self.ranks, parts, self.streams, strict=True):
            with torch.cuda.stream(stream):
                tokens.append(rank.choose(part))
        torch.cuda.synchronize()
        return tokens


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    for rank in group.ranks:
        rank.give_up()
    torch.cuda.synchronize()


def parts_of(whole: torch.Tensor) -> list[torch.Tensor]:
    return [part.clone() for part in whole.chunk(NUM_RANKS, 1)]  # each begins at whole chunks


def random_logits(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(rows, NUM_RANKS * columns, generator=generator, device=DEVICE).bfloat16()


@pytest.mark.parametrize("columns", COLUMNS)
def test_tokens_match_all_logits_whatever_the_rows(group, columns):
    for seed, rows in enumerate((1, 9, 1, 256, 64, 1, 1, 300, 2)):
        whole = random_logits(rows, columns, seed)  # in bfloat16 many are equal
        whole[0, [columns + 1, 3 * columns - 1]] = 40.0
        wanted = whole.float().argmax(1)
        if rows > 8:
            whole[4, columns - 1], whole[5, 2 * columns], whole[6] = torch.nan, torch.inf, -torch.inf
            whole[7], whole[7, 5], whole[7, columns + 5] = -1.0, -0.0, 0.0
            whole[8], whole[8, columns] = -torch.inf, -3.0
            wanted[4:9] = torch.tensor([-1, -1, -1, 5, columns])
        found = group.choose(parts_of(whole))
        assert all(torch.equal(tokens, wanted) for tokens in found), rows


def test_tokens_are_right_however_many_were_chosen(group):
    for rank in group.ranks:
        rank._state[0] = CALLS_AROUND - 3 - (1 << 32)  # int32
    for seed, rows in enumerate((4, 9, 1, 9, 9, 2)):
        whole = random_logits(rows, 40, seed)
        assert all(torch.equal(tokens, whole.float().argmax(1)) for tokens in group.choose(parts_of(whole))), seed


def test_captured_choices_hand_their_tokens_on_at_each_replay(group):
    rows, columns = 5, 75_968
    parts = parts_of(random_logits(rows, columns, 0))
    slots = torch.tensor([3, 1, 0, 6, 2], device=DEVICE)
    places = [
        HandOn(
            slots,
            torch.full((8,), 77, dtype=torch.int64, device=DEVICE),
            torch.zeros(2, dtype=torch.int64, device=DEVICE),
            torch.zeros(4, 9, dtype=torch.int64, device=DEVICE),
        )
        for _ in range(NUM_RANKS)
    ]
    torch.cuda.synchronize()
    graphs = []
    for rank, part, place, stream in zip(group.ranks, parts, places, group.streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            rank.choose(part, place)
        graphs.append(graph)
    for replay in range(6):
        whole = random_logits(rows, columns, replay + 1)
        whole[1] = torch.nan
        for part, value in zip(parts, parts_of(whole), strict=True):
            part.copy_(value)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, group.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        wanted = whole.float().argmax(1)
        wanted[1] = -1
        for place in places:
            assert torch.equal(place.chosen[replay % 4, :rows], wanted)
            assert place.replay_slot[0] == (replay + 1) % 4
            kept = torch.full_like(place.last_tokens, 77)
            kept[slots] = wanted.clamp(min=0)
            kept[0] = 77
            assert torch.equal(place.last_tokens, kept)


def test_a_rank_that_is_alone_ends_when_it_is_told_so(group):
    part = parts_of(random_logits(3, 40, 0))[0]
    torch.cuda.synchronize()
    with torch.cuda.stream(group.streams[0]):
        group.ranks[0].choose(part)
    assert not group.streams[0].query()
    group.ranks[0].give_up()
    torch.cuda.synchronize()


def test_the_family_finds_no_fault(kernels):
    assert list(family("ranks").faults([PushKernel(), *kernels], DEVICE)) == []
