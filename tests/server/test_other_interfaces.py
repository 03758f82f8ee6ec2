"""/v1/responses through OpenAI's client, and /v1/messages event by event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.server.harness import Answer, Server, fake_server

HELLO = [{"role": "user", "content": "def"}]
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_text(server: Server, messages: list[dict[str, Any]], **fields: Any) -> str:
    body = {"messages": messages, "max_tokens": 9, "temperature": 0, **fields}
    return server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]


def test_a_response_is_the_chats_text(server, client):
    response = client.responses.create(
        model="fake", input="def", instructions="Be brief.", max_output_tokens=9, temperature=0, metadata={"a": "b"}
    )
    Response.model_validate(response.model_dump(), strict=True)
    assert response.output_text == chat_text(server, [{"role": "system", "content": "Be brief."}, *HELLO])
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 9
    assert response.metadata == {"a": "b"}


def test_a_streamed_response_has_the_events_in_order_and_the_same_text(client):
    items = [{"role": "user", "content": [{"type": "input_text", "text": "def"}]}]
    whole = client.responses.create(model="fake", input=items, max_output_tokens=9, temperature=0)
    events = list(client.responses.create(model="fake", input=items, max_output_tokens=9, temperature=0, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": {"type": "mcp"}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"input": [{"type": "reasoning", "content": [{"type": "text", "text": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"text": {"format": {"type": "json"}}}, "text.format"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": 3}, "input"),
    ],
)
def test_a_response_is_refused_by_the_fields_name(server, fields, param):
    answer = server.post("/v1/responses", {"input": "x", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


def message(server: Server, **fields: Any) -> Answer:
    return server.post(
        "/v1/messages", {"model": "fake", "messages": HELLO, "max_tokens": 9, "temperature": 0, **fields}
    )


def test_a_message_is_the_chats_text(server):
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    told = message(server, system=system, metadata={"user_id": "u"}).json
    expected = chat_text(server, [{"role": "system", "content": "Be\nbrief."}, *HELLO])
    assert told["content"] == [{"type": "text", "text": expected}]
    assert (told["type"], told["role"], told["stop_reason"]) == ("message", "assistant", "max_tokens")
    usage = told["usage"]
    assert usage["output_tokens"] == 9
    counted = server.post("/v1/messages/count_tokens", {"messages": HELLO, "system": system}).json["input_tokens"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_streamed_message_has_the_events_in_order_and_the_same_text(server):
    whole = message(server).json
    events = []
    for block in message(server, stream=True).body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == whole["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert events[-2]["usage"]["output_tokens"] == 9


def test_a_message_ends_at_a_stop_sequence_and_goes_on_from_a_last_message_of_the_assistants(server):
    told = message(server, max_tokens=200, stop_sequences=["e"]).json
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "e")
    for content in ("Once", "end", "", [{"type": "text", "text": "im"}]):
        begun = [*HELLO, {"role": "assistant", "content": content}]
        assert message(server, messages=begun).json["content"][0]["text"] == chat_text(
            server, begun, continue_final_message=True
        )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens: expected an integer"),
        ({"tools": [{"name": "f"}]}, "tools: tool 0: expected {'name': …, 'input_schema': …}"),
        ({"tools": [{"type": "web_search_20250305", "name": "f"}]}, "tools of the server's own are not served"),
        ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "(f): defer_loading is not served"),
        ({"tool_choice": {"type": "function"}}, "tool_choice: expected {'type': 'auto'}"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: 'required' without tools"),
        ({"thinking": {"type": "on"}}, "thinking: expected a type of enabled, adaptive or disabled"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "expected its tool_result"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "no tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{**USE, "input": "x"}]}]}, "input, an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "expected the source of an image to be"),
        ({"system": [{"type": "image"}]}, "system: expected blocks of type text, got str 'image'"),
        ({"messages": []}, "no messages"),
    ],
)
def test_a_message_is_refused_in_anthropics_shape(server, fields, says):
    answer = message(server, **fields)
    assert answer.status == 400
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert says in answer.json["error"]["message"]
