"""Followers that are started ahead: a group takes them, and nobody else keeps one alive."""

from __future__ import annotations

import os
import socket
import tempfile
from types import SimpleNamespace

import pytest

from mllm_compile.config.schema import EngineConfig
from mllm_compile.ranks.ahead import RanksAhead, ranks_ahead
from mllm_compile.ranks.launch_local import LocalLauncher, LocalRank
from mllm_compile.ranks.start import receive_shared


def config(**runtime: object) -> EngineConfig:
    return EngineConfig.from_dict({"model": {"path": "a/b"}, "runtime": {"device": "cpu", **runtime}})


def started(ahead: RanksAhead) -> dict[int, LocalRank]:
    return dict(ahead._waiting)


def test_those_that_are_not_taken_end_with_what_would_have_needed_them():
    with pytest.raises(ValueError, match="no such model"), ranks_ahead(config(tensor_parallel_size=3)) as ahead:
        processes = started(ahead)
        assert list(processes) == [1, 2]
        assert ahead.take(2) is processes[2]
        assert ahead.take(2) is None
        raise ValueError("no such model")
    assert processes[1].has_ended()
    assert not processes[2].has_ended()
    processes[2].close()
    assert processes[2].has_ended()


def test_a_group_s_follower_is_the_one_that_was_started_ahead_and_is_given_what_ranks_share():
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as shared:
        taken = SimpleNamespace(socket=ours)
        ring = SimpleNamespace(memory=shared.fileno(), event=shared.fileno())
        start = SimpleNamespace(rank=2, ring=ring, meeting_place=shared.fileno())
        assert LocalLauncher({2: taken}.get).start(start) is taken
        received = receive_shared(theirs)
        assert received is not None
        assert {os.fstat(descriptor).st_ino for descriptor in received} == {os.fstat(shared.fileno()).st_ino}
        for descriptor in received:
            os.close(descriptor)
        ours.close()
        assert receive_shared(theirs) is None, "rank 0 needs no followers"


def test_one_that_has_ended_is_not_taken():
    with ranks_ahead(config(expert_parallel_size=2)) as ahead:
        (process,) = started(ahead).values()
        process.kill()
        process._process.wait()
        assert ahead.take(1) is None


@pytest.mark.parametrize("runtime", [{}, {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}])
def test_none_are_started_for_one_rank_or_by_ray(runtime, tmp_path):
    for source in (config(**runtime), tmp_path):
        with ranks_ahead(source) as ahead:
            assert not started(ahead)
