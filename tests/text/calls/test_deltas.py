"""Events in OpenAI's shapes."""

from mllm_compile.text.calls.deltas import chunk_deltas, whole_message
from mllm_compile.text.calls.events import ArgumentsDelta, CallEnd, CallStart, ContentDelta, End, ReasoningDelta

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
