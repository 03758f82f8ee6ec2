"""Answers with a form over HTTP: the embedded model keeps to it, and a form that compiles holds up nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response

from tests.server.harness import Server, eventually, fake_server

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Describe a list."}]


class Thing(pydantic.BaseModel, extra="forbid", strict=True):
    name: str = pydantic.Field(max_length=8)
    kind: Literal["list", "dict"]
    size: int = pydantic.Field(ge=0, le=9)


class Kind(pydantic.BaseModel, extra="forbid", strict=True):
    kind: Literal["list", "dict"]


KIND = {"type": "json_schema", "name": "kind", "schema": Kind.model_json_schema()}
SCHEMA = Thing.model_json_schema()
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_by_a_schema_is_valid_and_streamed_as_it_is_not_streamed(client, seed):
    fields = {"model": "tiny", "messages": HELLO, "max_tokens": 150, "seed": seed, "temperature": 1.5}
    whole = client.chat.completions.create(response_format=FORMAT, **fields).choices[0]
    Thing.model_validate_json(whole.message.content)
    assert whole.finish_reason == "stop"
    chunks = client.chat.completions.create(response_format=FORMAT, stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content


def test_the_client_parses_an_answer_into_its_own_class(client):
    told = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Kind, max_tokens=300)
    assert isinstance(told.choices[0].message.parsed, Kind)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
        ({"guided_grammar": 'root ::= "x" [yz] "x"'}, "x[yz]x"),
        ({"structured_outputs": {"regex": "(no){2}"}}, "nono"),
        ({"structured_outputs": {"json": {"enum": ["a"]}}}, '"a"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}}, "7"),
    ],
)
def test_a_form_works_under_each_of_its_names(tiny_server, fields, pattern):
    body = {"max_tokens": 40, "n": 3, "temperature": 1, **fields}
    chats = tiny_server.post(CHAT, {"messages": HELLO, **body}).json["choices"]
    completions = tiny_server.post("/v1/completions", {"prompt": ["A list", "A dict"], **body}).json["choices"]
    texts = [choice["message"]["content"] for choice in chats] + [choice["text"] for choice in completions]
    assert len(texts) == 9
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_a_response_has_the_form_of_its_text(client):
    told = client.responses.create(model="tiny", input="A list", text={"format": KIND})
    Response.model_validate(told.model_dump(by_alias=True), strict=True)
    Kind.model_validate_json(told.output_text)
    assert told.text.format.name == "kind"


def test_a_message_has_the_form_of_its_output_config(tiny_server):
    body = {"messages": HELLO, "max_tokens": 300, "output_config": {"format": KIND}}
    Kind.model_validate_json(tiny_server.post("/v1/messages", body).json["content"][0]["text"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("responses", {"input": "x", "text": {"format": KIND | {"schema": {"type": "no"}}}}, "text.format"),
        ("responses", {"input": "x", "text": {"format": KIND | {"schema": 3}}}, "text.format"),
        ("chat/completions", {"response_format": {"type": "json_schema", "schema": {"type": "no"}}}, "response_format"),
        ("chat/completions", {"guided_regex": "(", "stream": True}, "guided_regex"),
        ("chat/completions", {"structured_outputs": {"grammar": "nothing"}}, "structured_outputs"),
        ("responses", {"input": "x", "text": {"verbosity": "low"}}, "text"),
    ],
)
def test_a_malformed_form_is_refused_by_the_fields_name(tiny_server, path, fields, param):
    answer = tiny_server.post(f"/v1/{path}", ({} if "input" in fields else {"messages": HELLO}) | fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert tiny_server.complete(max_tokens=1).status == 200


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Forms with `slow` in them compile as long as this is there."""
    path = tmp_path / "gate"
    path.touch()
    return path


def test_other_requests_go_on_while_a_form_compiles_and_it_is_answered_after(gate):
    with fake_server(environment={"MLLM_FAKE_SLOW_FORM": str(gate)}) as server:
        slow = server.open("/v1/completions", {"prompt": "def", "max_tokens": 3, "guided_regex": "slow"})
        eventually(lambda: server.figure("mllm:requests_waiting") == 1)
        assert server.complete(stream=True).events[-1] is None
        assert server.complete(guided_regex="another").status == 200
        assert server.complete(guided_regex="refused").error["param"] == "guided_regex"
        assert server.figure("mllm:requests_waiting") == 1
        gate.unlink()
        with slow, HTTPResponse(slow) as response:
            response.begin()
            assert response.status == 200
            assert json.load(response)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("form", ["slow", "slow and refused"])
def test_a_client_that_leaves_while_its_form_compiles_leaves_nothing_behind(gate, form):
    with fake_server(environment={"MLLM_FAKE_SLOW_FORM": str(gate)}) as server:
        left = server.open("/v1/completions", {"prompt": "def", "max_tokens": 400, "guided_regex": form})
        eventually(lambda: server.figure("mllm:requests_waiting") == 1)
        left.close()
        eventually(lambda: server.figure("mllm:requests_waiting") == 0)
        gate.unlink()
        # Those with one form are built in turn, so the one that is gone was built before.
        assert server.complete(guided_regex=form, max_tokens=2).status == (400 if "refused" in form else 200)
        generated = 0 if "refused" in form else 2
        eventually(lambda: server.figure("mllm:generated_tokens_total") == generated)


def test_a_form_that_compiles_does_not_keep_a_server_from_ending(gate):
    options = {"shutdown_timeout_s": 0.1}
    with fake_server(options, environment={"MLLM_FAKE_SLOW_FORM": str(gate)}) as server:
        slow = server.open("/v1/completions", {"prompt": "def", "guided_regex": "slow"})
        eventually(lambda: server.figure("mllm:requests_waiting") == 1)
        assert server.end() == 0
        assert slow.recv(64).startswith(b"HTTP/1.1 503")
        slow.close()
