"""Bodies of all kinds: no answer is an internal error, and the engine lives on."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from mllm_compile.server.api import anthropic, fields, responses
from mllm_compile.server.api.foreign_fields import FOREIGN, OF_MESSAGES, OF_RESPONSES
from tests.hang_guard import HANG_S
from tests.sample import how_to_repeat, seed
from tests.server.harness import Server, fake_server

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
PATHS = (
    "/v1/completions", CHAT, RESPONSES, MESSAGES, "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/v1/abort",
)  # fmt: skip
KINDS = (fields.CompletionFields, fields.ChatFields, responses.ResponseFields, anthropic.MessagesFields)
REFUSED = (FOREIGN, OF_RESPONSES, OF_MESSAGES)
NAMES = sorted(
    {"no_such", *(name for kind in KINDS for name in kind.__struct_fields__), *(n for r in REFUSED for n in r)}
)
LIMITS = ("max_tokens", "max_output_tokens", "max_completion_tokens")
HELLO = [{"role": "user", "content": "hi"}]
SUBJECTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def"},
    CHAT: {"messages": HELLO},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HELLO},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "def"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/abort": {},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e300, 2**31, 2**63, -(2**63), 10**30, "", "a", "é☕", "\x00", "\ud800",
    "1",    "x" * 3000, [], [[]], [1, 2], [0] * 600, ["a", "b"], ["a", 1], [[1, 2], [3]], [None], [-1], {}, {"a": 1},
    {"0": 1}, {"1": "b"}, [{}], [{"role": "user", "content": "hi"}], [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": 1}], {"include_usage": True},
    {"type": "json_object"}, "auto", "any", "required", "tool", "function", "text", "assistant", "user",
    [[[1]]], {"enable_thinking": True}, {"add_generation_prompt": 1},
]  # fmt: skip


# Requests with all that a conversation may have; some parts are then replaced.
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "so"},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "max_tokens": 3,
    },
    MESSAGES: {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": ""},
                    {"type": "text", "text": "well"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "1"}]},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "type": "custom"}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
        "output_config": {"format": None},
        "max_tokens": 3,
    },
    RESPONSES: {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": False}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 3,
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = {"delay_s": 0.0, "template": "QWEN3", "says": False, "limits": {"max_model_len": 1024}}
    with fake_server(settings=settings) as server:
        yield server


def changed(part: Any, rng: random.Random) -> Any:
    """A value with a few parts changed or left out."""
    if rng.random() < 0.03:
        return rng.choice(ODD)
    if isinstance(part, dict):
        return {name: changed(value, rng) for name, value in part.items() if rng.random() > 0.02}
    if isinstance(part, list):
        return [changed(value, rng) for value in part if rng.random() > 0.02]
    return part


def random_request(rng: random.Random) -> tuple[str, bytes]:
    path = rng.choice(PATHS)
    if path in WHOLE and rng.random() < 0.6:
        body = {name: changed(value, rng) for name, value in WHOLE[path].items() if rng.random() > 0.05}
        return path, data_of(bounded(path, body | {"stream": rng.random() < 0.5}, rng), rng)
    return path, random_body(path, rng)


def bounded(path: str, body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A request that asks for what is answered soon."""
    for name in LIMITS:
        value = body.get(name)
        if name in body or name == ("max_output_tokens" if path == RESPONSES else "max_tokens"):
            body[name] = value if isinstance(value, int) and value <= 9 else rng.choice([1, 2, 0, -1, "2"])
    return body


def random_body(path: str, rng: random.Random) -> bytes:
    if rng.random() < 0.05:
        return rng.randbytes(rng.randint(0, 60))
    body: dict[str, Any] = {}
    if rng.random() < 0.8:
        body |= SUBJECTS[path]
    for name in rng.sample(NAMES, rng.randint(0, 4)):
        body[name] = rng.choice(ODD)
    return data_of(bounded(path, body, rng), rng)


def data_of(body: dict[str, Any], rng: random.Random) -> bytes:
    data = json.dumps(body).encode()
    if rng.random() < 0.05:
        cut = rng.randrange(len(data))
        data = data[:cut] + rng.randbytes(3) + data[cut + rng.randint(0, 5) :]
    return data


def run(server: Server, count: int) -> set[str]:
    """Asks so many times; returns the paths that have answered."""
    rng = random.Random(seed())
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    statuses, answered = set(), set()
    for _ in range(count):
        path, body = random_request(rng)
        connection.request("POST", path, body)
        response = connection.getresponse()
        answer = response.read()
        statuses.add(response.status)
        if response.status == 200:
            answered.add(path)
        assert response.status < 500, f"{path} {body!r}: {answer!r}; {how_to_repeat()}"
        if response.status != 200:
            assert json.loads(answer)["error"]["message"], body
    assert {200, 400} <= statuses
    assert "Traceback" not in server.said
    assert server.figure("mllm:engine_restarts_total") == 0
    assert server.figure("mllm:requests_waiting") == 0
    assert server.complete().status == 200
    return answered


def test_no_body_is_an_internal_error(server):
    run(server, 400)


@pytest.mark.slow
def test_none_of_ten_thousand_bodies_is_an_internal_error(server):
    assert run(server, 10_000) >= set(PATHS) - {"/v1/abort"}  # it seldom has an id
