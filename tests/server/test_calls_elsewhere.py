"""Tool calls and reasoning of /v1/messages and /v1/responses, through Anthropic's client and OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mllm_compile.server.api.anthropic import read_chat
from tests.sample import sample_of
from tests.server.harness import Server, fake_server
from tests.server.test_calls import ARGUMENTS, LIMITS, READ, SAID, TOOLS, call, say

TOLD = TypeAdapter(ResponseStreamEvent), TypeAdapter(RawMessageStreamEvent)
FUNCTIONS = [{"type": "function", **tool["function"], "strict": None} for tool in TOOLS]
USES = [
    {"name": tool["function"]["name"], "description": "One.", "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]
THINKING = {"type": "enabled", "budget_tokens": 1024}
Read = tuple[str | None, str | None, list[tuple[str, str]], str]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server(settings={"template": "QWEN3", "limits": LIMITS}) as server:
        yield server


@pytest.fixture(scope="module")
def openai_client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def read_response(response: Response) -> Read:
    """Content, reasoning, calls and the chat's finish_reason."""
    Response.model_validate(response.model_dump(), strict=True)
    texts = {"message": "", "reasoning": ""}
    calls = []
    for item in response.output:
        if item.type == "function_call":
            calls.append((item.name, item.arguments))
        else:
            texts[item.type] += "".join(part.text for part in item.content)
    finished = "length" if response.status == "incomplete" else "tool_calls" if calls else "stop"
    return texts["message"] or None, texts["reasoning"] or None, calls, finished


def read_events(events: list[Any]) -> Response:
    """The response of a stream; every item's deltas are what the item has at its end."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        TOLD[0].validate_python(event.model_dump(), strict=True)
    response = events[-1].response
    for index, item in enumerate(response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert (own[0].type, own[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert own[-1].item == item
        deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
    return response


@pytest.mark.parametrize("kind", SAID)
def test_a_response_has_items_of_reasoning_text_and_calls(openai_client, kind):
    fields: dict[str, Any] = {"model": "fake", "input": say(SAID[kind]), "tools": FUNCTIONS, "max_output_tokens": 300}
    whole = openai_client.responses.create(**fields)
    assert read_response(whole) == READ[kind]
    assert (whole.usage.output_tokens_details.reasoning_tokens > 0) == (READ[kind][1] is not None)
    assert whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert read_response(read_events(list(openai_client.responses.create(stream=True, **fields)))) == READ[kind]


def test_a_response_takes_back_its_own_items(server, openai_client):
    fields: dict[str, Any] = {"model": "fake", "tools": FUNCTIONS, "max_output_tokens": 300}
    asked = say(SAID["thinking, call"])
    first = openai_client.responses.create(input=asked, **fields)
    made = first.output[-1]
    items = [item.model_dump(exclude_none=True) for item in first.output]
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "20 degrees"}
    second = openai_client.responses.create(input=[*asked, *items, result, *say("Yes.")], **fields)
    assert second.output_text == "Yes."
    chat = [
        *asked,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "What is asked?",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "20 degrees"},
        *say("Yes."),
    ]
    told = server.post("/v1/chat/completions", {"messages": chat, "tools": TOOLS, "max_tokens": 300}).json
    assert second.usage.input_tokens == told["usage"]["prompt_tokens"]


def read_message(told: Message) -> Read:
    Message.model_validate(told.model_dump(), strict=True)
    texts = {"text": "", "thinking": ""}
    calls = []
    for block in told.content:
        if block.type == "tool_use":
            calls.append((block.name, json.dumps(block.input)))
        else:
            texts[block.type] += getattr(block, block.type)
    finished = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}[told.stop_reason]
    return texts["text"] or None, texts["thinking"] or None, calls, finished


def parsed(read: Read) -> Read:
    content, reasoning, calls, reason = read
    return content, reasoning, [(name, json.dumps(json.loads(arguments))) for name, arguments in calls], reason


@pytest.mark.parametrize("kind", SAID)
def test_a_message_has_blocks_of_thinking_text_and_calls(client, kind):
    fields: dict[str, Any] = {
        "model": "fake", "messages": say(SAID[kind]), "tools": USES, "max_tokens": 300, "thinking": THINKING,
    }  # fmt: skip
    assert read_message(client.messages.create(**fields)) == parsed(READ[kind])
    with client.messages.stream(**fields) as stream:
        assert read_message(stream.get_final_message()) == parsed(READ[kind])
    events = list(client.messages.create(stream=True, **fields))
    parts: list[str] = []
    for event in events:
        TOLD[1].validate_python(event.model_dump(), strict=True)
        if event.type == "content_block_start":
            assert event.index == len(parts)
            parts.append("")
        elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            parts[event.index] += event.delta.partial_json
    assert [part for part in parts if part] == [arguments for _, arguments in READ[kind][2]]


def test_thinking_is_in_a_message_where_it_is_asked_for(server):
    body = {"messages": say(SAID["thinking"]), "max_tokens": 300}
    for thinking in (None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        told = server.post("/v1/messages", {**body, "thinking": thinking})
        assert told.json["content"] == [{"type": "text", "text": "It is warm."}]
        assert b"thinking" not in server.post("/v1/messages", {**body, "thinking": thinking, "stream": True}).body
    told = server.post("/v1/messages", {**body, "thinking": THINKING})
    assert told.json["content"][0] == {"type": "thinking", "thinking": "What is asked?", "signature": ""}
    assert told.headers["x-mllm-ignored"] == "thinking.budget_tokens"


@pytest.mark.parametrize(("kind", "most"), sample_of([(kind, most) for kind in SAID for most in range(1, 60, 3)], 12))
def test_an_answer_that_is_cut_is_streamed_as_it_is_not_streamed(openai_client, client, kind, most):
    fields: dict[str, Any] = {"model": "fake", "messages": say(SAID[kind]), "tools": USES, "max_tokens": most}
    whole = client.messages.create(thinking=THINKING, **fields)
    blocks: list[list[str]] = []
    for event in client.messages.create(stream=True, thinking=THINKING, **fields):
        if event.type == "content_block_start":
            blocks.append([event.content_block.type, ""])
        elif event.type == "content_block_delta":
            blocks[event.index][1] += next(iter(event.delta.model_dump(exclude={"type"}).values()))
    assert [block_kind for block_kind, _ in blocks] == [block.type for block in whole.content]
    for (block_kind, text), block in zip(blocks, whole.content, strict=True):
        if block_kind == "tool_use":
            assert block.input in ({"INVALID_JSON": text}, json.loads(text) if text.endswith("}") else {})
        else:
            assert text == getattr(block, block_kind)
    asked: dict[str, Any] = {"model": "fake", "input": fields["messages"], "tools": FUNCTIONS}
    asked["max_output_tokens"] = most
    told = openai_client.responses.create(**asked)
    assert read_response(read_events(list(openai_client.responses.create(stream=True, **asked)))) == read_response(told)


def test_a_message_takes_back_its_own_blocks(server, client):
    fields: dict[str, Any] = {"model": "fake", "tools": USES, "max_tokens": 300, "thinking": THINKING}
    asked = say("I ask.\n" + call())
    first = client.messages.create(messages=asked, **fields)
    use = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "20 degrees"}]}
    reply = {"role": "user", "content": [result, {"type": "text", "text": say("Yes.")[0]["content"]}]}
    messages = [*asked, {"role": "assistant", "content": first.content}, reply]
    second = client.messages.create(messages=messages, **fields)
    assert [block.text for block in second.content] == ["Yes."]
    called = {"name": "weather", "arguments": json.dumps(use.input, ensure_ascii=False)}
    chat = [
        *asked,
        {
            "role": "assistant",
            "content": "I ask.",
            "tool_calls": [{"id": "x", "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "20 degrees"},
        *say("Yes."),
    ]
    told = server.post("/v1/chat/completions", {"messages": chat, "tools": TOOLS, "max_tokens": 300}).json
    usage = second.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == told["usage"]["prompt_tokens"]
    counted = client.messages.count_tokens(model="fake", messages=messages, tools=USES)
    assert counted.input_tokens == told["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "auto", "disable_parallel_tool_use": True},
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "weather"},
    ],
)
def test_a_message_is_over_after_one_call_where_more_are_not_wanted(client, choice):
    told = client.messages.create(
        model="fake",
        messages=say(SAID["two calls"]),
        tools=USES,
        tool_choice=choice,
        max_tokens=300,
    )
    assert read_message(told)[2:] == ([("weather", json.dumps(json.loads(ARGUMENTS)))], "tool_calls")


@pytest.mark.parametrize(("thinking", "may_reason"), [(None, True), ("adaptive", True), ("disabled", False)])
def test_a_forced_call_has_no_reasoning_where_a_message_disables_thinking(thinking, may_reason):
    body = {"messages": say("x"), "max_tokens": 9, "thinking": thinking and {"type": thinking}}
    fields, _ = read_chat(json.dumps(body).encode())
    assert fields.may_reason() is may_reason


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "refused"}])
def test_a_forced_call_becomes_a_form_by_either_interface(server, choice):
    # The fake refuses a form that names this tool, so the form is asked for.
    body = {"messages": say("x"), "max_tokens": 9, "tools": [{"name": "refused", "input_schema": {}}]}
    answer = server.post("/v1/messages", {**body, "tool_choice": choice})
    assert "structural_tag is refused" in answer.json["error"]["message"]
    how: Any = "required" if choice["type"] == "any" else {"type": "function", "name": "refused"}
    asked = {"input": "x", "tools": [{"type": "function", "name": "refused", "parameters": None}], "tool_choice": how}
    answer = server.post("/v1/responses", asked)
    assert (answer.status, answer.error["param"]) == (400, "tools")


def test_what_a_response_asks_for_in_vain_is_named(server):
    asked = {"input": say("x"), "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    answer = server.post("/v1/responses", asked)
    assert (answer.status, answer.headers["x-mllm-ignored"]) == (200, "reasoning.summary")
