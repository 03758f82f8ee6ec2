"""Ranks that are actors of Ray: tokens are one rank's, and a killed actor ends all with its reason."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.engine.start import assemble
from mllm_compile.errors import ConfigError, DeviceError, EngineDeadError
from mllm_compile.ranks.by_ray import installed
from tests.hang_guard import until
from tests.tiny_model import tiny_config

with_ray = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
PROMPTS = ["A", "The for statement is used to iterate over the elements of a sequence"]
NUM_RANKS = 3  # the engine's, and two actors


def config_of(cache: Path, **runtime: Any) -> Any:
    return tiny_config(cache, compile={"backend": "eager"}, runtime=runtime)


def of_ray(cache: Path) -> Any:
    return config_of(cache, tensor_parallel_size=NUM_RANKS, distributed_executor_backend="ray")


def actors() -> set[int]:
    """The processes of ranks that Ray has started here."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith(b"ray::MllmRank"):
                found.add(int(folder.name))
    return found


def wait_until_none_of(processes: set[int]) -> None:
    until(lambda: not actors() & processes, "the end of Ray's actors")


@pytest.fixture(scope="module")
def cluster() -> Any:
    import ray

    ray.init(num_cpus=NUM_RANKS, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
class TestActors:
    pytestmark = with_ray

    def test_two_actors_give_one_ranks_tokens_and_a_closed_engine_leaves_none(self, eager_cache):
        before = actors()
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        with Engine(config_of(eager_cache)) as alone, Engine(of_ray(eager_cache)) as ranks:
            ours = actors() - before
            assert len(ours) == NUM_RANKS - 1
            found = [[output.token_ids for output in engine.generate(PROMPTS, params)] for engine in (alone, ranks)]
        assert found[0] == found[1]
        wait_until_none_of(ours)

    def test_a_killed_actor_ends_every_request_with_its_reason_and_the_other_actor(self, eager_cache):
        before = actors()
        engine = Engine(of_ray(eager_cache))
        try:
            ours = actors() - before
            os.kill(min(ours), signal.SIGSTOP)  # so no request can end before it
            endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
            streams = [engine.stream(prompt, endless) for prompt in PROMPTS]
            os.kill(min(ours), signal.SIGKILL)
            for stream in streams:
                with pytest.raises(
                    EngineDeadError, match=r"rank \d \(process \d+\) (ended: .*, as Ray says|.* it hangs)"
                ):
                    for _ in stream:
                        pass
            assert not engine.is_alive
        finally:
            engine.close()
        wait_until_none_of(ours)

    def test_ranks_that_ray_has_no_room_for_are_refused(self, eager_cache, monkeypatch):
        monkeypatch.setattr("mllm_compile.ranks.by_ray.placement.place.__defaults__", (1.0,))
        config = config_of(
            eager_cache, tensor_parallel_size=4, pipeline_parallel_size=2, distributed_executor_backend="ray"
        )
        with pytest.raises(DeviceError, match="no room for 8 ranks after 1 s: they take 7 CPUs beside"):
            Engine(config)


def test_a_config_that_wants_ray_says_where_it_is_not_installed_ahead_of_a_compile(tmp_path, monkeypatch):
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(assemble, "load_or_compile", lambda *_: pytest.fail("it was told too late"))
    with pytest.raises(ConfigError, match=r"Ray is not installed: pip install 'mllm-compile\[ray\]'"):
        Engine(of_ray(tmp_path))
