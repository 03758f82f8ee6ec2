"""The end of a pipeline's communicator: no group is waited for while another may still wait for a rank that is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mllm_compile.runtime.collectives.stages import StagedCommunicator


class Group:
    """A group of some ranks; `all_of` are the groups of one rank."""

    def __init__(self, rank: int, ranks: Sequence[int], all_of: list[Group]) -> None:
        self._ranks, self._of_all = list(ranks), rank
        self.rank, self.size = self._ranks.index(rank), len(self._ranks)
        self.is_given_up = self.is_closed = False
        self._all_of = all_of
        all_of.append(self)

    def part(self, name: str, ranks: Sequence[int]) -> Group | None:
        return Group(self._of_all, ranks, self._all_of) if self._of_all in ranks else None

    def link(self) -> Group:
        return self

    def abort(self) -> None:
        self.is_given_up = True

    def close(self) -> None:
        assert all(one.is_given_up for one in self._all_of), "closing waits for the device, and so for what they do"
        self.is_closed = True


@pytest.mark.parametrize("rank", range(4))
def test_all_groups_are_given_up_before_the_first_is_closed(rank):
    groups: list[Group] = []
    staged = StagedCommunicator(Group(rank, range(4), groups), 2)
    assert len(groups) >= 3, "the whole, its stage, and links"
    staged.close()
    assert all(one.is_closed for one in groups)
