"""Followers that are started early: a group takes them, and nobody else keeps one alive."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest

from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import DeviceError
from mllm_compile.process import bytecode
from mllm_compile.process.timeline import Timeline
from mllm_compile.ranks import follower
from mllm_compile.ranks.early_start import EarlyRanks, early_ranks
from mllm_compile.ranks.launch_local import LocalLauncher, LocalRank
from mllm_compile.ranks.start import Answer, Lines, Meeting, Start
from mllm_compile.runtime.files.json_data import from_json, parse_json
from mllm_compile.runtime.ranks.ring import RingPlace
from tests.e2e.test_ranks import followers


def config(**runtime: object) -> EngineConfig:
    return EngineConfig.from_dict({"model": {"path": "a/b"}, "runtime": {"device": "cpu", **runtime}})


def started(early: EarlyRanks) -> dict[int, LocalRank]:
    return dict(early._waiting)


def test_those_that_are_not_taken_end_with_what_would_have_needed_them():
    with pytest.raises(ValueError, match="no such model"), early_ranks(config(tensor_parallel_size=3)) as early:
        processes = started(early)
        assert list(processes) == [1, 2]
        assert early.take(2) is processes[2]
        assert early.take(2) is None
        raise ValueError("no such model")
    assert processes[1].has_ended()
    assert not processes[2].has_ended()
    processes[2].close()
    assert processes[2].has_ended()


def test_a_group_s_follower_is_the_one_that_was_started_ahead():
    taken = SimpleNamespace()
    assert LocalLauncher({2: taken}.get).start(2) is taken


def test_a_line_brings_descriptors_and_what_nobody_sends_is_not_waited_for():
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as shared:
        sender, receiver = Lines(ours), Lines(theirs)
        assert list(sender.arrived()) == []
        place = RingPlace(shared.fileno(), shared.fileno(), 4096, 0)
        sender.send(Meeting(1, 2, 1, "cpu", None), [shared.fileno()])
        sender.send(Start("f", "w", {"long": "x" * 70_000}, None, 1, place, 100), [place.memory, place.event])
        assert from_json(Meeting, parse_json(receiver.receive())) == Meeting(1, 2, 1, "cpu", None)
        (first,) = receiver.descriptors()
        assert Start.from_line(receiver.receive()).ring == place
        received = [first, *receiver.descriptors()]
        assert len(received) == 3
        assert {os.fstat(descriptor).st_ino for descriptor in received} == {os.fstat(shared.fileno()).st_ino}
        for descriptor in received:
            os.close(descriptor)
        receiver.send(Answer("ready", began=1.5, stages=(("load", 0.5, 2.0),)))
        (line,) = sender.arrived()
        assert from_json(Answer, parse_json(line)).stages == (("load", 0.5, 2.0),)
        ours.close()
        with pytest.raises(EOFError):
            receiver.receive()


def runtime_without_a_config() -> Any:
    limits = {"max_model_len": 64, "page_size": 16, "max_running_requests": 2, "max_num_batched_tokens": 32}
    runtime = SimpleNamespace(**limits, expert_parallel_size=1)
    config = SimpleNamespace(runtime=runtime, model_dump=lambda mode: {})
    return SimpleNamespace(config=config, folder="nowhere", weights_root="nowhere")


def test_a_group_meets_ahead_of_what_it_loads_and_ends_with_what_would_have_needed_it():
    before = set(followers())
    timeline = Timeline()
    with early_ranks(config(tensor_parallel_size=2)) as early:
        early.meet(timeline)
        group = early.take_group(2, 1, "cpu")
        assert group is not None
        assert early.take_group(2, 1, "cpu") is None
        try:
            communicator = group.communicator()
            assert (communicator.rank, communicator.size) == (0, 2)
            assert {"start ranks", "ranks import", "ranks join"} <= {span.name for span in timeline.spans}
            group.load(runtime_without_a_config(), num_pages=None)
            with pytest.raises(DeviceError, match=r"rank 1: .* validation errors? for ResolvedConfig"):
                group.wait_ready()
        finally:
            group.close()
        assert set(followers()) == before
    with early_ranks(config(tensor_parallel_size=2)) as early:
        early.meet(timeline)
    assert set(followers()) == before


def test_what_cannot_meet_is_left_to_be_refused():
    with early_ranks(config(tensor_parallel_size=2, device="cuda:99")) as early:
        early.meet(Timeline())
        assert early.take_group(2, 1, "cuda:99") is None
        assert list(started(early)) == [1]


@pytest.mark.parametrize("of_runtime", [(3, 1, "cpu"), (2, 2, "cpu"), (2, 1, "cuda:0")])
def test_a_group_that_is_not_the_runtime_s_is_ended(of_runtime):
    early, ended = EarlyRanks(), []
    early._group = SimpleNamespace(size=2, num_stages=1, device="cpu", close=lambda: ended.append(True))  # type: ignore[assignment]
    assert early.take_group(*of_runtime) is None
    assert ended == [True]


def test_a_runtime_s_folder_says_how_many_are_started_ahead(eager_folder, tmp_path):
    manifest = json.loads((eager_folder / "manifest.json").read_text())
    for count in (2, 1, 99, -1, "many"):
        manifest["config"]["runtime"]["tensor_parallel_size"] = count
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with early_ranks(tmp_path) as early:
            assert list(started(early)) == ([1] if count == 2 else [])
            assert early._device == ("cpu" if count == 2 else "")
    (tmp_path / "manifest.json").write_text("{")
    with early_ranks(tmp_path) as early:
        assert not started(early)


def test_one_that_has_ended_is_not_taken():
    with early_ranks(config(expert_parallel_size=2)) as early:
        (process,) = started(early).values()
        process.kill()
        process._process.wait()
        assert early.take(1) is None


@pytest.mark.parametrize("runtime", [{}, {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}])
def test_none_are_started_for_one_rank_or_by_ray(runtime, tmp_path):
    for source in (config(**runtime), tmp_path):
        with early_ranks(source) as early:
            assert not started(early)


def test_a_follower_keeps_the_bytecode_of_what_it_imports_as_rank_0_does(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(bytecode, "_is_kept_beside", lambda package: False)
    monkeypatch.setattr(bytecode, "_folder", lambda: str(tmp_path))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(follower, "serve", lambda connection, *_: kept.append((connection, sys.pycache_prefix)))
    ours, theirs = socket.socketpair()
    with ours:
        follower.main(theirs.detach())
        ((connection, folder),) = kept
        connection.close()
    assert folder == str(tmp_path)
