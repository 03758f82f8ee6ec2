"""Adapters over HTTP: their names, loads and unloads while others are answered, and the figures."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from mllm_compile.cli.serve_options import check_adapters, lora_keys
from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.sources import with_lora
from mllm_compile.engine.core.adapter_queue import AdapterParts
from mllm_compile.errors import ConfigError, EngineDeadError, MllmError
from mllm_compile.server.adapter_changes import AdapterChanges
from mllm_compile.server.api.errors import ApiError, of_kind
from mllm_compile.server.api.interfaces import CompletionRequest
from mllm_compile.server.backend.process import EXIT_DEAD, AdapterReplacedError, EngineServer, _submission
from mllm_compile.server.flow.writer import Outlet
from mllm_compile.server.front import Front
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.supervisor import READY
from mllm_compile.server.wire import messages
from mllm_compile.server.wire.messages import AdapterCard, AdaptersChanged, Begin, LoadAdapter
from tests.adapters.fake_device import BASE, FakeDevice, adapter_folder
from tests.fakes import fake_engine
from tests.hang_guard import HANG_S
from tests.server.harness import Answer, Server, eventually, fake_server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("one", "two", "three"), start=1):
        adapter_folder(folder / name, number)
    return folder


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[Server]:
    settings = {"adapters": {"one": str(folders / "one")}}
    with fake_server({"allow_runtime_lora": True}, settings) as server:
        yield server


def load(server: Server, name: Any, path: Any, **more: Any) -> Answer:
    return server.post(LOAD, {"lora_name": name, "lora_path": str(path), **more})


def tokens_of(server: Server, model: str) -> list[int]:
    answer = server.complete(model=model, ignore_eos=True, max_tokens=8, temperature=0, return_token_ids=True)
    assert answer.status == 200, answer.body
    assert answer.json["model"] == model
    return answer.json["choices"][0]["token_ids"]


def test_the_model_of_a_request_names_the_adapter(server):
    assert tokens_of(server, "one") != tokens_of(server, "fake")
    assert tokens_of(server, "one") == tokens_of(server, "one")
    missing = server.complete(model="none")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    assert missing.error["message"] == "the model 'none' does not exist; this server has fake, one"


def test_models_lists_adapters_with_their_parent_folder_and_version(server, folders):
    of_model, of_adapter = server.get("/v1/models").json["data"][:2]
    assert (of_model["id"], of_model["parent"]) == ("fake", None)
    assert (of_adapter["id"], of_adapter["parent"], of_adapter["root"]) == ("one", "fake", str(folders / "one"))
    assert of_adapter["version"] == 1
    assert server.get("/v1/models/one").json == of_adapter


def test_an_adapter_is_loaded_replaced_and_unloaded_with_vllms_answers(server, folders):
    loaded = load(server, "two", folders / "two")
    assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'two' added successfully.")
    assert "LoRA adapter 'two' added successfully. client" in server.said
    first = tokens_of(server, "two")
    twice = load(server, "two", folders / "three")
    assert (twice.status, twice.error["param"]) == (400, "lora_name")
    assert "adapter 'two' has already been loaded, as version 1" in twice.error["message"]
    assert load(server, "two", folders / "three", load_inplace=True).status == 200
    assert tokens_of(server, "two") != first
    assert server.get("/v1/models/two").json["version"] == 2
    gone = server.post(UNLOAD, {"lora_name": "two", "lora_int_id": None})
    assert (gone.status, gone.body) == (200, b"Success: LoRA adapter 'two' removed successfully.")
    assert server.complete(model="two").status == 404
    again = server.post(UNLOAD, {"lora_name": "two"})
    assert (again.status, again.error["message"]) == (404, "The lora adapter 'two' cannot be found.")


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("", "x", "Both 'lora_name' and 'lora_path' must be provided."),
        ("new", "", "Both 'lora_name' and 'lora_path' must be provided."),
        ("new", "/no/such/folder", "/no/such/folder has no adapter_config.json; expected a folder as PEFT's"),
        ("new", "a\0b", "lora_path: expected a path of up to 4096 characters"),
        ("fake", "/x", "lora_name: fake is the model's own name; give the adapter another"),
        ("a\nb", "/x", "expected an adapter's name of up to 200 letters"),
    ],
)
def test_a_load_that_is_refused_says_why(server, name, path, said):
    answer = load(server, name, path)
    assert answer.status == (404 if path == "/no/such/folder" else 400)  # that one may be there later
    assert said in answer.error["message"]
    assert tokens_of(server, "one")


def test_trainers_paths_put_an_adapter_in_the_place_of_one_of_its_name(folders):
    """prime-rl's and SkyRL's clients load each step's under one name, and say nothing of load_inplace."""
    with fake_server({"allow_runtime_lora": True, "enable_rl": True}, {"adapters": {}}) as server:
        seen = []
        for path, folder in (("/load_lora_adapter", "two"), ("/skyrl/v1/load_lora_adapter", "three")):
            answer = server.post(path, {"lora_name": "r4", "lora_path": str(folders / folder)})
            assert answer.status == 200, answer.body
            seen.append(tokens_of(server, "r4"))
        assert seen[0] != seen[1]
        late = server.post("/load_lora_adapter", {"lora_name": "r4", "lora_path": str(folders / "late")})
        assert late.status == 404, "prime-rl asks again for files that another machine has just written"


def test_the_figures_name_the_adapters_in_use(server):
    lines = server.get("/metrics").body.decode().splitlines()
    assert any(line.startswith('vllm:lora_requests_info{max_lora="2",running_lora_adapters="') for line in lines)


def test_without_leave_nothing_is_loaded(folders):
    with fake_server({}, {"adapters": {"one": str(folders / "one")}}) as server:
        for path in (LOAD, UNLOAD):
            answer = server.post(path, {"lora_name": "two", "lora_path": str(folders / "two")})
            assert (answer.status, answer.error["code"]) == (403, "unsupported_endpoint")
            assert "serve with --allow-runtime-lora, and an API key" in answer.error["message"]
        assert server.get("/v1/models").json["data"][1]["id"] == "one"


def test_an_engine_that_is_started_again_has_the_adapters_of_the_one_before(tmp_path):
    """But one without folder: a line says so. One that has changed since is another version."""
    for number, name in enumerate(("kept", "changed", "gone", "unloaded"), start=1):
        adapter_folder(tmp_path / name, number)
    of_config = {"adapters": {name: str(tmp_path / name) for name in ("unloaded", "gone")}}
    with fake_server({"allow_runtime_lora": True}, of_config) as server:
        for name in ("kept", "changed"):
            assert load(server, name, tmp_path / name).status == 200
        first = tokens_of(server, "kept"), tokens_of(server, "changed")
        assert server.post(UNLOAD, {"lora_name": "unloaded"}).status == 200
        shutil.rmtree(tmp_path / "gone")
        adapter_folder(tmp_path / "changed", 7)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        eventually(lambda: server.figure("mllm:engine_restarts_total") == 1 and server.is_ready(), "another engine")
        cards = {card["id"]: card.get("version") for card in server.get("/v1/models").json["data"]}
        assert cards == {"fake": None, "kept": 1, "changed": 2}
        assert tokens_of(server, "kept") == first[0]
        assert tokens_of(server, "changed") != first[1]
        eventually(lambda: "adapter 'gone' is left out:" in server.said, "the line")
        assert "has no adapter_config.json" in server.said


def test_an_adapter_whose_folder_has_lost_it_is_gone_for_its_requests_alone(server, tmp_path):
    for number, name in enumerate(("a", "b", "c"), start=1):
        assert load(server, name, adapter_folder(tmp_path / name, number)).status == 200
    for name in ("b", "c"):  # there are two places
        tokens_of(server, name)
    adapter_folder(tmp_path / "a", 9)
    answer = server.complete(model="a")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (410, "adapter_gone", "model")
    assert "a has changed since it was loaded as version 1 of 'a'. Load it again" in answer.error["message"]
    assert tokens_of(server, "c")
    for name in ("a", "b", "c"):
        assert server.post(UNLOAD, {"lora_name": name}).status == 200


def test_an_adapter_that_is_unloaded_while_its_request_is_read_is_not_the_model():
    front = Front(ServeOptions(model="m", served_names=("m",)), lambda *args: [])
    front.supervisor.state = READY
    front.names.set_adapters([AdapterCard("one", 1, "/one")])

    async def facts(model: str | None) -> Any:
        front.names.check(model)
        return SimpleNamespace(pooling=None)

    class Request(CompletionRequest):
        def __init__(self) -> None:
            super().__init__(b'{"model": "one", "prompt": [5]}')
            self.is_quick = False

        def plan(self, facts: Any) -> Any:
            front.names.set_adapters([])
            return SimpleNamespace(unread=(), num_bytes=0)

    front.facts = facts  # type: ignore[method-assign, assignment]
    share: Any = SimpleNamespace(num_bytes=0, hold=lambda num_bytes: None)
    with pytest.raises(ApiError, match="the model 'one' does not exist; this server has m"):
        asyncio.run(front.start(Request(), "cmpl-", Outlet(None), "", None, share))  # type: ignore[arg-type]
    assert front.admission.waiting == 0


def test_the_last_list_of_adapters_that_the_front_hears_is_the_newest():
    """The thread that has loaded the first one is slow to tell."""
    names: list[str] = []
    told: list[list[str]] = []
    tells_one = threading.Event()

    def send(frame: bytes) -> None:
        event = messages.decode_event(frame)
        assert isinstance(event, AdaptersChanged)
        cards = [card.name for card in event.adapters]
        if cards == ["one"]:
            tells_one.set()
            time.sleep(0.2)  # the other could tell its list now, if nothing kept it
        told.append(cards)

    engine: Any = SimpleNamespace(
        load_adapter=lambda name, path, replace: names.append(name),
        list_adapters=lambda: [SimpleNamespace(name=name, version=1, folder="/", digest="") for name in names],
    )
    server = EngineServer(SimpleNamespace(send=send))  # type: ignore[arg-type]
    first = threading.Thread(target=server._change_adapters, args=(engine, LoadAdapter(1, "one", "/", False)))
    first.start()
    assert tells_one.wait(HANG_S)
    server._change_adapters(engine, LoadAdapter(2, "two", "/", False))
    first.join()
    assert told == [["one"], ["one", "two"]]


def test_loads_whose_clients_are_gone_count_until_they_are_over():
    sent: list[Any] = []
    changes = AdapterChanges(sent.append)

    async def ask() -> None:
        for _ in range(64):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await changes.load("one", "/one", replace=False)
        with pytest.raises(ApiError, match="64 adapters are being loaded"):
            await changes.load("one", "/one", replace=False)
        changes.over(AdaptersChanged(sent[0].key, []))
        last = asyncio.ensure_future(changes.unload("one"))
        await asyncio.sleep(0)
        changes.fail_all(ApiError(503, "the engine is lost"))
        with pytest.raises(ApiError, match="the engine is lost"):
            await last

    asyncio.run(ask())
    assert len(sent) == 65


def test_a_request_for_a_version_that_was_replaced_meanwhile_may_come_again(folders):
    device = FakeDevice()
    device.reading.set()
    with fake_engine(adapters=AdapterParts(BASE, device)) as engine:
        engine.load_adapter("one", folders / "one")
        prompt = np.array([5, 6], dtype=np.int32).tobytes()
        submits = [messages.Submit(1, "id", prompt, {}, 0, None, adapter=("one", version)) for version in (1, 2)]
        assert _submission(engine, submits[0]).adapter is engine.list_adapters()[0]
        with pytest.raises(AdapterReplacedError, match="adapter 'one' was replaced while") as raised:
            _submission(engine, submits[1])
    error = of_kind(type(raised.value).__name__, str(raised.value))
    assert (error.status, error.code, error.retry_after_s) == (409, "adapter_replaced", 1)


def test_a_request_without_a_name_may_have_the_adapter_of_sounds(folders):
    device = FakeDevice()
    device.reading.set()
    with fake_engine(adapters=AdapterParts(BASE, device)) as engine:
        engine.load_adapter("sounds", folders / "one")
        found = engine.builder.build_one([5, 6], None, adapter="sounds")
        unnamed = messages.Submit(1, "id", np.array([5, 6], dtype=np.int32).tobytes(), {}, 0, None)
        with patch.object(engine.builder, "build_one", return_value=found) as build:
            assert _submission(engine, unnamed) is found
        assert build.call_args.kwargs["adapter"] is None


def test_loads_are_allowed_with_a_key_or_on_this_machine_alone():
    for options in ({"host": "0.0.0.0", "api_keys": ("k",)}, {}, {"uds": "/s"}):
        assert ServeOptions(model="m", allow_runtime_lora=True, **options).allow_runtime_lora
    with pytest.raises(ConfigError, match=r"--allow-runtime-lora: expected an API key beside it"):
        ServeOptions(model="m", host="0.0.0.0", allow_runtime_lora=True)


def test_the_options_are_the_section():
    keys = lora_keys(True, 2, 8, ["sql=/adapters/sql"])
    assert keys == {"max_adapters": 2, "max_rank": 8, "adapters": {"sql": "/adapters/sql"}}
    assert lora_keys(True, None, None, ()) == {"max_adapters": 4}
    assert lora_keys(True, None, None, (), 8) == {"max_adapters": 8}
    source = EngineConfig.from_dict({"model": {"path": "m"}, "lora": {"max_adapters": 1, "adapters": {"law": "/law"}}})
    found = with_lora(source, keys)
    assert isinstance(found, EngineConfig)
    assert (found.lora.max_adapters, found.lora.adapters) == (2, {"law": "/law", "sql": "/adapters/sql"})
    assert with_lora(source, {}) is source
    with pytest.raises(ConfigError, match=r"/r is a compiled runtime, whose config it has"):
        with_lora(Path("/r"), keys)


@pytest.mark.parametrize(
    ("lora", "options", "said"),
    [
        ({}, {"allow_runtime_lora": True}, "--allow-runtime-lora: expected --enable-lora beside it"),
        ({"max_adapters": 1, "adapters": {"org/m": "/a"}}, {}, "'org/m' is the model's own name"),
        ({"max_adapters": 1, "adapters": {"sql": "/a"}}, {"served_names": ("m", "sql")}, "'sql' is the model's own"),
        ({"max_adapters": 1, "adapters": {"m/n": "/no"}}, {}, "/no has no adapter_config.json; expected a folder as"),
        ({"max_adapters": 1}, {"served_names": ("m",), "allow_runtime_lora": True}, None),
    ],
)
def test_an_adapter_that_could_not_be_served_is_refused_before_a_model_is_compiled(lora, options, said, folders):
    if said is None:
        lora = lora | {"adapters": {"org/m": str(folders / "one")}}
    source = EngineConfig.from_dict({"model": {"path": "org/m"}, "lora": lora})
    given = ServeOptions(model="org/m", **options)
    if said is None:
        check_adapters(source, given)
        return
    with pytest.raises(MllmError, match=said):
        check_adapters(source, given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((False, 2, None, ()), "--max-loras: expected --enable-lora beside it"),
        ((False, None, None, ["a=b"]), "--lora-modules: expected --enable-lora beside it"),
        ((True, None, None, ["sql"]), "--lora-modules: expected NAME=PATH, got 'sql'"),
        ((True, None, None, ["a=b", "a=c"]), "--lora-modules: 'a' is there twice"),
    ],
)
def test_a_wrong_option_is_named(given, said):
    with pytest.raises(ConfigError, match=said):
        lora_keys(*given)


def test_an_engine_that_dies_while_it_loads_adapters_again_tells_of_none(monkeypatch):
    """The front would take its list for all that there are."""
    told: list[Any] = []
    channel = SimpleNamespace(
        is_over=False,
        wait=lambda seconds: [messages.encode_commands([Begin([AdapterCard("one", 3, "/one")])])],
        send=lambda frame: told.append(messages.decode_event(frame)),
        close=lambda linger_s: None,
    )
    engine = fake_engine()
    engine.adapters = SimpleNamespace(resume=lambda *card: engine.close())  # type: ignore[assignment]

    def load_adapter(name: str, path: str) -> None:
        raise EngineDeadError("the device is lost")

    monkeypatch.setattr(engine, "load_adapter", load_adapter)
    reporter: Any = SimpleNamespace(stage=lambda name: None, announce=lambda text: None)
    code = EngineServer(channel).run(lambda timeline, loads, ask: engine, reporter)  # type: ignore[arg-type]
    assert code == EXIT_DEAD
    assert [type(event).__name__ for event in told] == ["Failed"]
