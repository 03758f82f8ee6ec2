"""The parts of the deployment that need no Ray."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from pydantic import ValidationError
from starlette.requests import Request

from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError
from mllm_compile.serve_ray import Options, app
from mllm_compile.serve_ray.build import _gpus_of
from mllm_compile.serve_ray.ingress import Ingress
from mllm_compile.serve_ray.replica import Asked, Replica, passed_on
from mllm_compile.server.flow.memory import Memory
from mllm_compile.server.http import Bodies
from mllm_compile.server.replicas.keys import Keys
from mllm_compile.server.replicas.routing import Routing
from mllm_compile.server.replicas.text import BLOCK, Text


def config_of(**runtime: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"path": "x"}, "runtime": runtime})


def ray_with(gpus: float) -> Any:
    return SimpleNamespace(cluster_resources=lambda: {"GPU": gpus} if gpus else {})


def test_without_ray_the_app_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs ray, aiohttp, starlette: pip install 'mllm-compile\[ray,serve\]'"):
        app(Options(model="x"))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"replicas": 2}, "replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas is 3 and max_replicas 2; expected less"),
        ({"target_ongoing_requests": 0}, "greater than 0"),
    ],
)
def test_options_that_cannot_be_are_refused(given, why):
    with pytest.raises(ValidationError, match=why):
        Options.model_validate({"model": "x"} | given)


@pytest.mark.parametrize("given", [{"distributed_executor_backend": "ray", "tensor_parallel_size": 2}, {"nnodes": 2}])
def test_ranks_of_other_nodes_are_refused(given):
    with pytest.raises(ConfigError, match=rf"runtime\.{next(iter(given))} is .*: a replica of Ray Serve has"):
        _gpus_of(config_of(**given), ray_with(8))


def test_a_replica_has_a_gpu_for_each_rank_where_there_are_some():
    assert _gpus_of(config_of(tensor_parallel_size=2), ray_with(8)) == 2
    assert _gpus_of(config_of(tensor_parallel_size=2), ray_with(0)) == 0
    assert _gpus_of(config_of(device="cpu"), ray_with(8)) == 0


def test_what_the_router_chooses_by_stays_with_it():
    asked = Asked("POST", "/v1/completions", [("a", "b")], b"{}", Keys(Text([1, 2], bytes(2 * BLOCK)), "session"))
    assert pickle.loads(pickle.dumps(asked)) == Asked("POST", "/v1/completions", [("a", "b")], b"{}")
    assert asked.keys.text.blocks == [1, 2]


def test_headers_of_a_connection_stay_with_it():
    assert passed_on([("Host", "x"), ("X-Session-Id", "a"), ("Transfer-Encoding", "chunked")]) == [
        ("X-Session-Id", "a")
    ]


def test_a_server_that_does_not_start_is_told_by_its_last_lines(tmp_path):
    with pytest.raises(RuntimeError, match=r"serve ended with code 2 before it was ready: .*no/such/model"):
        Replica("no/such/model.yaml", [], [str(Path(__file__).parents[2])])


class Replicas:
    """The handle of replicas; each answers with what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(remote=self._relay)

    async def _relay(self, asked: Asked) -> AsyncIterator[Any]:
        self.asked.append(asked)
        yield 200, []
        yield asked.body


@pytest.fixture
def ingress(monkeypatch: pytest.MonkeyPatch) -> tuple[Ingress, Replicas]:
    exceptions = ModuleType("ray.exceptions")
    exceptions.RayError = type("RayError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    replicas = Replicas()
    return Ingress(replicas), replicas


def request_of(*parts: bytes, path: str = "/v1/completions", query: bytes = b"") -> Request:
    """A request whose body comes in parts, and then no more where the last one is not empty."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(part)}

    scope = {"type": "http", "method": "POST", "path": path, "query_string": query, "headers": []}
    return Request(scope, receive)


@pytest.mark.parametrize("name", ["a%41", "a?b", "a#b", "ä b", "a/b", "a//b"])
def test_a_session_is_asked_for_by_the_name_that_the_client_gave(ingress, name):
    front, replicas = ingress
    asyncio.run(front(request_of(b"", path=f"/v1/sessions/{name}", query=b"a=%2F&b=%3F")))
    path, _, query = replicas.asked[0].path.partition("?")
    assert unquote(path) == f"/v1/sessions/{name}" and path.isascii() and not set(path) & set(" #")
    assert query == "a=%2F&b=%3F"


def test_names_of_sessions_are_each_clients_own_and_short(ingress):
    front, replicas = ingress
    for owner in (b"one", b"one", b"two"):
        request = request_of(json.dumps({"prompt": "a", "session_id": "a" * 100_000}).encode(), b"")
        request.scope["headers"] = [(b"authorization", owner)]
        asyncio.run(front(request))
    first, again, other = [asked.keys.session for asked in replicas.asked]
    assert first == again != other
    assert first is not None and len(first) < 100  # the router remembers 65,536 of them


def test_a_body_that_is_no_json_is_left_for_a_replica_to_refuse(ingress):
    front, replicas = ingress
    assert asyncio.run(front(request_of(b"no json", b""))).status_code == 200
    assert replicas.asked == [Asked("POST", "/v1/completions", [], b"no json")]


def test_a_body_that_no_server_takes_is_refused_before_it_is_read_whole(ingress, monkeypatch):
    front, replicas = ingress
    front._bodies = Bodies(100, held=len, bound="no server takes more")
    assert asyncio.run(front(request_of(b"x" * 100, b""))).status_code == 200
    answer = asyncio.run(front(request_of(b"x" * 90, b"x" * 20)))  # it would wait for more
    assert answer.status_code == 413 and b"larger than 100 bytes; no server takes more" in answer.body
    assert len(replicas.asked) == 1


def test_bodies_together_have_a_bound_and_those_that_were_passed_on_are_counted_no_more(ingress):
    front, _ = ingress
    front._memory = Memory(150)

    async def scenario() -> list[int]:
        first = asyncio.ensure_future(front(request_of(b"x" * 100)))
        await asyncio.sleep(0)
        refused = await front(request_of(b"x" * 100, b""))
        assert refused.headers["retry-after"] == "1"
        first.cancel()
        await asyncio.wait({first})
        return [refused.status_code, (await front(request_of(b"x" * 100, b""))).status_code]

    assert asyncio.run(scenario()) == [429, 200] and front._memory.held == 0


class Router:
    """Ray's class of routers, as far as one is used."""

    curr_replicas: dict[Any, Any]


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("ray.serve.request_router")
    module.RequestRouter = Router  # type: ignore[attr-defined]
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.serve.request_router", module)
    monkeypatch.delitem(sys.modules, "mllm_compile.serve_ray.router", raising=False)
    from mllm_compile.serve_ray.router import PrefixRouter

    made = PrefixRouter()
    made.curr_replicas = {}
    made.initialize_state()
    yield made
    sys.modules.pop("mllm_compile.serve_ray.router", None)


def replicas_of(*names: str) -> list[Any]:
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


def pending(number: int, *blocks: int) -> Any:
    asked = Asked("POST", "/", [], b"", Keys(Text(blocks, bytes(BLOCK) * len(blocks))))
    return SimpleNamespace(args=[asked], metadata=SimpleNamespace(internal_request_id=str(number)))


async def first_of(router: Any, replicas: list[Any], request: Any) -> str:
    ranks = await router.choose_replicas(replicas, request)
    assert {one.replica_id.unique_id for rank in ranks for one in rank} == {
        one.replica_id.unique_id for one in replicas
    }
    return ranks[0][0].replica_id.unique_id


def test_a_prompt_goes_where_its_prefix_is_until_that_one_has_much_more_to_do_or_is_gone(router):
    async def scenario() -> None:
        replicas = replicas_of("a", "b")
        home = await first_of(router, replicas, pending(0, 1, 2, 3))
        other = "b" if home == "a" else "a"
        assert await first_of(router, replicas, pending(1, 7)) == other
        assert await first_of(router, replicas, pending(2, 1, 2, 3, 4)) == home
        for number in range(10, 22):
            router.on_request_routed(pending(number), SimpleNamespace(unique_id=home), None)
        assert await first_of(router, replicas, pending(3, 1, 2, 3)) == other
        for number in range(10, 22):
            router.on_request_completed(SimpleNamespace(unique_id=home), str(number))
        router.on_request_completed(SimpleNamespace(unique_id=home), "never routed")
        assert await first_of(router, replicas_of(other, "c"), pending(4, 1, 2, 3)) in (other, "c")
        router.on_request_routed(pending(5), SimpleNamespace(unique_id=home), None)  # it ended meanwhile
        assert await router.choose_replicas([], pending(6)) == []

    asyncio.run(scenario())


def test_a_request_that_outlives_its_engine_is_counted_no_more():
    routing = Routing(("a",))
    with routing.serving("a"):
        routing.have(("b",))
        routing.have(("a", "b"))
        assert routing.loads == {"a": 0, "b": 0} and BLOCK
    assert routing.loads == {"a": 0, "b": 0}
