"""Messages as clients send them, for templates; events as clients read them."""

import json
import re

import pytest

from mllm_compile.errors import RequestError
from mllm_compile.text.calls.events import ArgumentsDelta, CallEnd, CallStart, ContentDelta, End, ReasoningDelta
from mllm_compile.text.calls.messages import chunk_deltas, for_template, whole_message
from mllm_compile.text.calls.parser import CallParser
from mllm_compile.text.calls.tools import read_tools
from tests.text.calls.cases import NAMES, SHOWING, TOOLS, answer, call, syntax, template


def assistant(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


@pytest.mark.parametrize("name", SHOWING)
def test_a_conversation_with_a_call_and_its_result_is_rendered(name):
    """As clients send one back: arguments are text, content is null, the id is of another server."""
    chat = [
        {"role": "user", "content": "When?"},
        assistant(call("get_weather", {"city": "Oslo"}, "call_0123456789abcdef01234567")),
        {"role": "tool", "tool_call_id": "call_0123456789abcdef01234567", "content": "[1, 2]"},
    ]
    prompt = template(name).render(for_template(chat, syntax(name)))
    assert "Oslo" in prompt and '"{' not in prompt and '\\"' not in prompt.replace('\\"', "", 0)


@pytest.mark.parametrize("name", NAMES)
def test_what_holds_no_calls_is_left_alone(name):
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "T"}]},
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
        "no message",
        {"role": "tool", "content": "no id"},
    ]
    assert for_template(chat, syntax(name)) == chat


def test_arguments_are_what_the_template_takes():
    spaced = '{"a":  1}'
    (message,) = for_template([assistant(call("f", spaced))], syntax("QWEN3"))
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    (message,) = for_template([assistant(call("f", spaced))], syntax("DEEPSEEK_V31"))
    assert message["tool_calls"][0]["function"]["arguments"] == spaced
    given = {"id": "i", "function": {"name": "f", "arguments": {"a": "é"}}}
    (message,) = for_template([assistant(given)], syntax("DEEPSEEK_V31"))
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "é"}'
    for none in (None, ""):
        given = {"id": "i", "function": {"name": "f", "arguments": none}}
        (message,) = for_template([assistant(given)], syntax("QWEN3"))
        assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_content_that_is_null_beside_calls_is_empty():
    (message,) = for_template([assistant(call("f", "{}"))], syntax("QWEN3"))
    assert message["content"] == ""
    (message,) = for_template([assistant()], syntax("QWEN3"))
    assert message == {"role": "assistant", "content": ""}


def test_ids_are_of_the_template_s_form_and_the_same_for_call_and_result():
    chat = [
        assistant(call("f", "{}", "call_long"), call("g", "{}", "abcdefghi")),
        {"role": "tool", "tool_call_id": "call_long", "content": "1"},
        {"role": "tool", "tool_call_id": "elsewhere", "content": "2"},
    ]
    calls, result, other = for_template(chat, syntax("MISTRAL"))
    first, second = (one["id"] for one in calls["tool_calls"])
    assert re.fullmatch("[A-Za-z0-9]{9}", first) and second == "abcdefghi"
    assert (result["tool_call_id"], result["name"]) == (first, "f")
    assert re.fullmatch("[A-Za-z0-9]{9}", other["tool_call_id"]) and "name" not in other
    calls, result, other = for_template(chat, syntax("KIMI_K2"))
    assert [one["id"] for one in calls["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    assert result["tool_call_id"] == "functions.f:0" and other["tool_call_id"] == "elsewhere"
    calls, result, _ = for_template(chat, syntax("QWEN3"))
    assert calls["tool_calls"][0]["id"] == result["tool_call_id"] == "call_long"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            assistant("f"),
            "messages: message 0: call 0 is str 'f'; expected {'id': …, 'type': 'function', 'function': {",
        ),
        (assistant({"type": "custom", "function": {}}), "messages: message 0: call 0 is dict {'type': 'custom', "),
        (assistant({"function": {"name": ""}}), "messages: message 0: call 0: its function's name is ''; expected the"),
        (assistant(call("f", "{}") | {"id": 3}), "messages: message 0: call 0: its id is int 3; expected a text."),
        (
            assistant({"function": {"name": "f", "arguments": 3}}),
            "messages: message 0: call 0 ('f'): its arguments are i",
        ),
        (assistant() | {"tool_calls": "f"}, "messages: message 0: tool_calls are str 'f'; expected a list of {'id'"),
        (assistant(*[call("f", "{}")] * 513), "messages: message 0 has 513 tool_calls; expected at most 512. Shorten"),
        ({"role": "assistant", "function_call": {}}, "messages: message 0 has a function_call; expected tool_calls, a"),
        (
            {"role": "tool", "tool_call_id": 3, "content": ""},
            "messages: message 0: tool_call_id is int 3; expected the",
        ),
        ({"role": "tool", "tool_call_id": "i"}, "messages: message 0, of a tool, has no content; expected the call's"),
    ],
)
def test_a_malformed_call_or_result_is_refused(message, said):
    with pytest.raises(RequestError, match="^" + re.escape(said)):
        for_template([message], syntax("QWEN3"))


def test_a_text_of_arguments_that_is_no_json_is_kept_where_the_template_takes_texts():
    (message,) = for_template([assistant(call("f", "{a"))], syntax("DEEPSEEK_V31"))
    assert message["tool_calls"][0]["function"]["arguments"] == "{a"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"text": "mkdir -p /tmp/a && cat > /tmp', {"text": "mkdir -p /tmp/a && cat > /tmp"}),
        ('{"a": 1, "b": [1, {"c": "x', {"a": 1, "b": [1, {"c": "x"}]}),
        ('{"a": 1, "b": [1, {"c": "x\\', {"a": 1, "b": [1, {"c": "x"}]}),
        ('{"a": "x\\\\', {"a": "x\\"}),
        ('{"a": "\\u00e', {"a": ""}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ('{"a": 1, "b"', {"a": 1}),
        ('{"a": 1, "b": ', {"a": 1}),
        ('{"a": {"b": 1}, ', {"a": {"b": 1}}),
        ('{"a": 12', {"a": 12}),
        ("{", {}),
        (' {"', {}),
        ('{"a": "}],{", "b": "', {"a": "}],{", "b": ""}),
        ("{a", {}),
        ("{city: Paris}", {"INVALID_JSON": "{city: Paris}"}),
        ('{"a": 1]', {"INVALID_JSON": '{"a": 1]'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('"Beijing"', {"INVALID_JSON": '"Beijing"'}),
        ("Beijing", {"INVALID_JSON": "Beijing"}),
        ("null", {}),
        ("[" * 100_000, {"INVALID_JSON": "[" * 100_000}),
        ('{"a":' * 100_000, {"INVALID_JSON": '{"a":' * 100_000}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_that_are_no_object_come_back_as_far_as_they_are_one(text, expected):
    (message,) = for_template([assistant(call("f", text))], syntax("QWEN3"))
    assert message["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize("name", SHOWING)
def test_an_answer_that_broke_off_anywhere_can_be_given_back(name):
    said = answer(name, [call("get_weather", {"city": 'O"s{lo', "where": {"x": [1, "ä\n"]}})], reasoning=None)
    tools = read_tools(TOOLS)
    for end in range(1, len(said) + 1):
        parser = CallParser(syntax(name), tools)
        message, _ = whole_message(parser.push(said[:end]) + parser.finish("length"))
        results = [
            {"role": "tool", "tool_call_id": one["id"], "content": "no JSON"} for one in message.get("tool_calls", ())
        ]
        chat = [{"role": "user", "content": "go"}, message, *results, {"role": "user", "content": "again"}]
        assert "again" in template(name).render(for_template(chat, syntax(name)), tools=TOOLS)


def test_messages_stay_as_the_client_gave_them():
    chat = [
        assistant(call("f", '{"a": 1}', "call_long")),
        {"role": "tool", "tool_call_id": "call_long", "content": "1"},
    ]
    before = json.dumps(chat)
    for_template(chat, syntax("MISTRAL"))
    assert json.dumps(chat) == before


# --- answers ---

EVENTS = [
    ReasoningDelta("Hm"),
    ReasoningDelta("."),
    ContentDelta("So"),
    ContentDelta(":"),
    CallStart(0, "a", "f"),
    ArgumentsDelta(0, "{"),
    ArgumentsDelta(0, "}"),
    CallEnd(0, True),
    CallStart(1, "b", "g"),
    ArgumentsDelta(1, "{}"),
    CallEnd(1, True),
    End("tool_calls"),
]


def test_events_become_deltas_of_chunks():
    assert chunk_deltas(EVENTS) == [
        {"reasoning": "Hm.", "reasoning_content": "Hm."},
        {"content": "So:"},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]
    assert chunk_deltas([]) == []


def test_events_become_a_message():
    message, reason = whole_message(EVENTS)
    assert reason == "tool_calls"
    assert message == {
        "role": "assistant",
        "content": "So:",
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_content_is_null_beside_calls_alone_and_empty_where_there_is_nothing():
    assert whole_message(EVENTS[4:])[0]["content"] is None
    assert whole_message([End("stop")]) == ({"role": "assistant", "content": ""}, "stop")


def test_the_deltas_of_a_stream_add_up_to_the_message():
    message, _ = whole_message(EVENTS)
    added = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    for delta in chunk_deltas(EVENTS):
        for key in ("content", "reasoning", "reasoning_content"):
            added[key] += delta.get(key, "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                added["tool_calls"].append({key: value for key, value in part.items() if key != "index"})
            else:
                added["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    assert {"role": "assistant", **added} == message
