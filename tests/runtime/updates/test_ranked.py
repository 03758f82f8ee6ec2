"""An update over ranks, each in this process: a follower does what rank 0 has sent, and nothing that it has refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from mllm_compile.runtime.errors import DeviceMemoryError, WeightUpdateError
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.runtime.updates.names import TensorNames
from mllm_compile.runtime.updates.places import Places
from mllm_compile.runtime.updates.ranked import RankedUpdate
from mllm_compile.runtime.updates.wire import FollowedUpdate, is_update
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec

ROWS, COLUMNS = 4, 6
TENSORS = {"up": torch.randn(ROWS, COLUMNS), "expert.0": torch.randn(2, 3), "expert.1": torch.randn(2, 3)}


def ranks() -> list[LiveWeights]:
    """Rows of `up` are divided; each rank has one expert."""
    specs = tuple(
        (
            WeightSpec(
                "up",
                (ROWS // 2, COLUMNS),
                torch.float32,
                (WeightPart("up", "f", 0, (ROWS, COLUMNS), (("narrow", 0, rank * ROWS // 2, ROWS // 2),)),),
            ),
            WeightSpec("experts", (2, 3), torch.bfloat16, (WeightPart(f"expert.{rank}", "f", 0, (2, 3)),)),
        )
        for rank in range(2)
    )
    names = TensorNames(specs, None, (), {})
    return [
        LiveWeights(
            specs[rank],
            {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs[rank]},
            {},
            {},
            lambda of_rank: Places(names, specs, of_rank),
            rank,
            2,
        )
        for rank in range(2)
    ]


def update_of(lives: list[LiveWeights], **options: bool) -> RankedUpdate:
    votes: list[int] = []
    followed = FollowedUpdate(lives[1], votes.append)

    def send(parts: Iterable[memoryview]) -> None:
        message = bytearray(b"".join(parts))
        assert is_update(message)
        followed.take(message)

    def agree(parts: Iterable[memoryview]) -> bool:
        send(parts)
        return bool(votes.pop())

    return RankedUpdate(lives[0], send, send, agree, **options)


def holds(lives: list[LiveWeights], tensors: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(live.tensors["up"], tensors["up"][rank * 2 : rank * 2 + 2])
        and torch.equal(live.tensors["experts"], tensors[f"expert.{rank}"].bfloat16())
        for rank, live in enumerate(lives)
    )


@pytest.mark.parametrize("is_direct", [False, True])
def test_each_rank_gets_its_part(is_direct):
    lives = ranks()
    update = update_of(lives, is_direct=is_direct)
    for name, tensor in TENSORS.items():
        update.take(name, tensor)
    update.check_complete()
    update.prepare()
    assert is_direct or not lives[1].tensors["up"].any()
    update.swap()
    assert holds(lives, TENSORS)


@pytest.mark.parametrize("name", TENSORS)
def test_a_direct_update_is_torn_as_soon_as_any_rank_has_written(name):
    lives = ranks()
    update = update_of(lives, is_direct=True, is_partial=True)
    assert not update.is_torn
    update.take(name, TENSORS[name])
    assert any(tensor.any() for live in lives for tensor in live.tensors.values())
    update.drop()
    assert update.is_torn


def test_rank_0_refuses_what_another_one_would():
    lives = ranks()
    update = update_of(lives)
    with pytest.raises(WeightUpdateError, match=r"'expert\.1' holds NaN or inf as bfloat16"):
        update.take("expert.1", torch.full((2, 3), 3.4e38))
    with pytest.raises(WeightUpdateError, match=r"'expert.1': expected shape \[2, 3\], got \[3, 2\]"):
        update.take("expert.1", torch.zeros(3, 2))
    for name in ("up", "expert.0"):
        update.take(name, TENSORS[name])
    with pytest.raises(WeightUpdateError, match=r"the update lacks 'expert\.1'"):
        update.check_complete()
    update.drop()
    assert not any(tensor.any() for live in lives for tensor in live.tensors.values())


def test_single_values_reach_the_rank_that_has_them():
    lives = ranks()
    update = update_of(lives, is_partial=True)
    update.take_delta("up", torch.tensor([0, 5, 23], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0]))
    update.prepare()
    update.swap()
    expected = torch.zeros(ROWS * COLUMNS)
    expected[[0, 5, 23]] = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(torch.cat([live.tensors["up"] for live in lives]).flatten(), expected)


def test_single_values_of_what_one_rank_has_alone_are_checked_by_rank_0():
    lives = ranks()
    update = update_of(lives, is_partial=True)
    for index, value, message in ((6, 1.0, "beyond its 6 values"), (0, 3.4e38, "holds NaN or inf as bfloat16")):
        with pytest.raises(WeightUpdateError, match=message):
            update.take_delta("expert.1", torch.tensor([index]), torch.tensor([value]))
    for rank in range(2):
        update.take_delta(f"expert.{rank}", torch.tensor([5]), torch.tensor([4.0 + rank]))
    update.prepare()
    update.swap()
    assert [live.tensors["experts"].flatten().tolist() for live in lives] == [[0] * 5 + [4], [0] * 5 + [5]]


class Full(dict[str, torch.Tensor]):
    """Weights of a device that has no room for another copy of one."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "up" and self.is_full:
            raise torch.OutOfMemoryError
        return super().__getitem__(name)

    is_full = True


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_follower_without_room_ends_the_update_alone(is_direct):
    lives = ranks()
    full = Full(lives[1].tensors)
    lives[1] = replace(lives[1], tensors=full)
    for _ in range(2):
        update = update_of(lives, is_direct=is_direct)
        for name, tensor in TENSORS.items():
            update.take(name, tensor)
        with pytest.raises(DeviceMemoryError, match="a rank that follows has no room"):
            update.prepare()
        update.drop()
        assert update.is_torn == is_direct
    full.is_full = False
    update = update_of(lives, is_direct=is_direct)
    for name, tensor in TENSORS.items():
        update.take(name, tensor)
    update.prepare()
    update.swap()
    assert holds(lives, TENSORS)


def test_places_are_found_once():
    live, other = ranks()
    found = []

    def find_places(rank: int) -> Places:
        found.append(rank)
        return other.find_places(rank)

    counted = replace(live, find_places=find_places)
    for _ in range(2):
        update_of([counted, other]).drop()
    assert sorted(found) == [0, 1]
