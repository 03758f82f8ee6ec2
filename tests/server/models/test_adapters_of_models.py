"""Adapters of several models: a name means one of them, and is loaded into the model that the client says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.fake_device import adapter_folder
from tests.server.harness import Server
from tests.server.models.servers import fake_models, states

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(adapter_folder(Path(folder, name), number)) for number, name in enumerate("xy", start=3)}


@pytest.fixture(scope="module")
def server(folders: dict[str, str]) -> Iterator[Server]:
    settings = {"a": {"adapters": {}}, "b": {"adapters": {"x": folders["x"]}}}
    with fake_models(settings, options={"allow_runtime_lora": True}) as server:
        yield server


def test_an_adapter_is_listed_and_served_by_its_model(server):
    cards = {card["id"]: card for card in server.get("/v1/models").json["data"]}
    assert (cards["x"]["parent"], cards["x"]["state"]) == ("b", "running")
    assert server.get("/v1/models/x").json == cards["x"]
    own, changed = (server.complete(model=name, temperature=0, return_token_ids=True).json for name in "bx")
    assert (changed["model"], changed["choices"] != own["choices"]) == ("x", True)


def test_an_adapter_is_loaded_into_the_model_that_is_said_and_its_name_means_that_alone(server, folders):
    load = {"lora_name": "y", "lora_path": folders["y"]}
    assert server.post("/v1/load_lora_adapter", load).error["message"].startswith("model: expected one of a, b")
    assert server.post("/v1/load_lora_adapter", load | {"model": "a"}).status == 200
    assert {"a", "b", "x", "y"} == set(states(server))
    assert server.complete(model="y").status == 200
    for name in ("x", "b", "y"):
        answer = server.post("/v1/load_lora_adapter", load | {"model": "b" if name == "y" else "a", "lora_name": name})
        assert (answer.status, "means another model" in answer.error["message"]) == (400, True), name
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "y", "model": "b"}).status == 400
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "y", "model": "a"}).status == 200
    assert server.complete(model="y").status == 404
