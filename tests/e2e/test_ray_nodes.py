"""Ranks over two nodes of Ray on one machine: each has folders of its own, and they share no memory. Their tokens are
one rank's, and where one is lost every request is told why, and nothing is left."""

from __future__ import annotations

import importlib.util
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import ConfigError, DeviceError, EngineDeadError, WeightUpdateError
from mllm_compile.ranks import nodes
from mllm_compile.ranks.by_ray import actors as actors_of
from mllm_compile.ranks.by_ray import nodes as ray_nodes
from tests.e2e.test_ranks import PROMPTS, tokens
from tests.e2e.test_ranks_by_ray import actors, wait_until_none_of
from tests.tiny_model import tiny_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
ADDRESS = "127.0.0.2"  # of the other node


class TwoNodes:
    """The driver's node, with room for an actor, and another with a cache of its own and room for two."""

    def __init__(self, cache: Path) -> None:
        from ray.cluster_utils import Cluster

        self.cache = cache
        store = {"object_store_memory": 80_000_000}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **store})
        self._other_args = {"num_cpus": 2, "node_ip_address": ADDRESS, **store}
        self._other_args["env_vars"] = {"MLLM_COMPILE_CACHE": str(cache)}
        self.other = self._cluster.add_node(**self._other_args)
        self.address = self._cluster.address

    def kill_other(self) -> None:
        """Ends the other node without a word."""
        self._cluster.remove_node(self.other, allow_graceful=False)

    def start_other(self) -> None:
        """Starts it anew."""
        self.other = self._cluster.add_node(**self._other_args)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    import ray

    made = TwoNodes(tmp_path_factory.mktemp("other") / "cache")
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.close()


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's paths are not on the other node, as both nodes have one file system."""
    wanted_of = ray_nodes.wanted_of

    def wanted_elsewhere(compiled: Any) -> Any:
        wanted, paths = wanted_of(compiled)
        folder = f"/not/there/runtimes/{Path(wanted.folder).name}"
        return replace(wanted, folder=folder, weights_root=wanted.weights_root and "/not/there/model"), paths

    monkeypatch.setattr(ray_nodes, "wanted_of", wanted_elsewhere)
    monkeypatch.setattr("mllm_compile.ranks.group.usable_cores", lambda: 1)  # all ranks have the same ones


def config_of(cache: Path, speculative: Any = None, **runtime: Any) -> Any:
    over = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    settings = {"max_num_batched_tokens": 32} | over | runtime
    sections = {} if speculative is None else {"speculative": speculative}
    return tiny_config(cache, compile={"backend": "eager"}, runtime=settings, **sections)


def ours_since(before: set[int]) -> set[int]:
    return actors() - before


def test_two_by_two_ranks_over_two_nodes_give_one_ranks_tokens_with_what_the_other_node_fetches(eager_cache, two):
    one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "distributed_executor_backend": "mp"}
    with Engine(config_of(eager_cache, **one)) as alone:
        expected = tokens(alone)
    before = actors()
    for _ in range(2):
        with Engine(config_of(eager_cache)) as engine:
            ours = ours_since(before)
            assert len(ours) == 3
            assert tokens(engine) == expected
            drawn = SamplingParams(temperature=0.8, seed=7, max_tokens=6, ignore_eos=True, logprobs=2)
            assert all(output.error is None for output in engine.generate(PROMPTS, drawn))
        wait_until_none_of(ours)
        fetched = sorted(path.parent.name for path in (two.cache / "runtimes").glob("*/manifest.json"))
        assert len(fetched) == 1, "the second start finds what the first has fetched"
    assert not list(two.cache.glob("*/.*.part"))


def test_a_node_that_is_killed_ends_every_request_with_its_reason_and_comes_again(eager_cache, two):
    before = actors()
    engine = Engine(config_of(eager_cache))
    try:
        ours = ours_since(before)
        endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        streams = [engine.stream(prompt, endless) for prompt in PROMPTS]
        next(iter(streams[0]))
        two.kill_other()
        for stream in streams:
            with pytest.raises(EngineDeadError, match=r"rank [23] on node 1 \([\d.]+\) (has )?ended"):
                for _ in stream:
                    pass
        assert not engine.is_alive
    finally:
        engine.close()
    wait_until_none_of(ours)
    two.start_other()
    with Engine(config_of(eager_cache)) as again:
        assert tokens(again)


class SlowLink(threading.Thread):
    """Passes connections on to a port, each byte so much later."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(daemon=True)
        self._delay_s, self.target = delay_s, ("", 0)
        self._listener = socket.create_server(("", 0))
        self.port = self._listener.getsockname()[1]

    def run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._delay_s < 0:  # never
                    continue
                far = socket.create_connection(self.target)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self._delay_s)
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowLink]:
    """The way of the other node's ranks to rank 0; the parameter is its delay in seconds."""
    slow, listen = SlowLink(request.param), nodes.Nodes.__init__

    def listen_behind_it(self: Any, *arguments: Any) -> None:
        listen(self, *arguments)
        slow.target, self.port = (self.host, self.port), slow.port

    monkeypatch.setattr(nodes.Nodes, "__init__", listen_behind_it)
    slow.start()
    yield slow
    slow.close()


@pytest.mark.parametrize("link", [0.02], indirect=True)
def test_over_a_slow_link_tokens_are_the_same(eager_cache, two, link):
    with Engine(config_of(eager_cache)) as engine:
        found = tokens(engine)
    with Engine(config_of(eager_cache, distributed_executor_backend="mp")) as here:
        assert tokens(here) == found


@pytest.mark.parametrize("link", [-1.0], indirect=True)
def test_a_rank_that_never_comes_is_named_in_time_and_nothing_is_left(eager_cache, two, link, monkeypatch):
    monkeypatch.setattr(nodes, "NODES_S", 3.0)
    before = actors()
    with pytest.raises(DeviceError, match=r"rank 2 on node 1 \(127\.0\.0\.2\) did not come to [\d.:]+ within 3 s"):
        Engine(config_of(eager_cache))
    wait_until_none_of(ours_since(before))


@pytest.mark.parametrize(
    ("module", "name", "other", "why"),
    [
        (
            actors_of,
            "__version__",
            "0.0.9",
            r"this node has mllm-compile [\w.+]+, and node 0 0\.0\.9\. Install",
        ),
        (ray_nodes, "hello_of", None, r"node 1 runs something else than node 0: passes is .* there and others here"),
    ],
)
def test_a_node_that_runs_something_else_is_named_and_nothing_is_left(
    eager_cache, two, module, name, other, why, monkeypatch
):
    hello_of = ray_nodes.hello_of

    def hello_of_another_runtime(*arguments: Any) -> Any:
        own = hello_of(*arguments)
        return replace(own, factors=own.factors | {"passes": "others"})

    monkeypatch.setattr(module, name, other or hello_of_another_runtime)
    before = actors()
    with pytest.raises(DeviceError, match=why):
        Engine(config_of(eager_cache))
    wait_until_none_of(ours_since(before))


FOUR = {"tensor_parallel_size": 4, "pipeline_parallel_size": 1}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(FOUR, id="tensor ranks that no node has room for"),
        pytest.param(FOUR | {"deterministic": True}, id="deterministic"),
        pytest.param({"speculative": {"method": "ngram"}}, id="drafts"),
        pytest.param({"enable_sleep_mode": True}, id="sleep mode"),
    ],
)
def test_what_works_over_nodes_gives_the_tokens_of_ranks_of_one_host(eager_cache, two, given):
    """Sums of the first two cross nodes; tests/ranks/test_by_ray.py holds the warning."""
    with Engine(config_of(eager_cache, **given)) as engine:
        found = tokens(engine)
        if "tensor_parallel_size" in given:
            with pytest.raises(WeightUpdateError, match="Ray has placed ranks on several nodes"):
                engine.update_weights([])
        if "enable_sleep_mode" in given:
            engine.sleep()
            engine.wake_up()
            assert tokens(engine) == found
    with Engine(config_of(eager_cache, distributed_executor_backend="mp", **given)) as here:
        assert tokens(here) == found


def test_what_is_of_one_host_is_refused_over_nodes(eager_cache, two):
    before = actors()
    with pytest.raises(ConfigError, match=r"runtime\.enable_dbo is set, which is for ranks of one node, and Ray has"):
        Engine(config_of(eager_cache, **FOUR, enable_dbo=True, dbo_prefill_token_threshold=16))
    wait_until_none_of(ours_since(before))


def test_a_stranger_at_rank_0s_port_is_not_let_in(eager_cache, two, monkeypatch):
    """One with another secret, say, who found the port."""
    refused: list[str] = []
    knocking: list[socket.socket] = []
    stranger, listen = nodes.Nodes._stranger, nodes.Nodes.__init__

    def knock(self: Any, *arguments: Any) -> None:
        listen(self, *arguments)
        knocking.append(socket.create_connection((self.host, self.port)))
        knocking[0].sendall(bytes(64))

    def noted(self: Any, connection: Any, text: str) -> None:
        refused.append(text)
        stranger(self, connection, text)

    monkeypatch.setattr(nodes.Nodes, "__init__", knock)
    monkeypatch.setattr(nodes.Nodes, "_stranger", noted)
    with Engine(config_of(eager_cache)) as engine:
        assert tokens(engine)
    knocking[0].close()
    assert len(refused) == 1 and "it does not know the secret" in refused[0]
