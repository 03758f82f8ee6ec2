"""Chats: what is a conversation, and what is refused before a template sees it."""

import re

import pytest

from mllm_compile.errors import RequestError
from tests.engine.cases import params


def test_a_chat_goes_through_the_template(engine):
    messages = [{"role": "user", "content": "hi"}]
    output = engine.chat(messages, params())[0]
    assert output.prompt == "user=hi;assistant="
    assert engine.chat(messages, params(), suffix="!")[0].prompt == "user=hi;!"
    begun = [*messages, {"role": "assistant", "content": "="}]
    assert engine.chat(begun, params(), continue_final_message=True)[0].prompt == "user=hi;assistant=="
    outputs = engine.chat([messages, messages], params())
    assert [o.token_ids for o in outputs] == [output.token_ids] * 2


NO_CONVERSATIONS = ["hello", ["hello"], {"role": "user", "content": "x"}, None, 3, b"hello"]
NO_CONVERSATION = [
    ([{"content": "x"}], r"message 0 has no role; expected \{'role': …, 'content': …\}, got dict \{'content': 'x'\}"),
    ([{"role": "user", "content": "x"}, {"role": "user", "text": "y"}], "message 1 has no content"),
    ([{"role": "user", "content": None}], "message 0 has no content"),
    ([{"role": "user", "content": "x"}, "y"], "message 1 is no message"),
    ([], "no messages; expected at least one"),
]


@pytest.mark.parametrize("messages", NO_CONVERSATIONS, ids=repr)
def test_a_chat_needs_a_list_of_messages(engine, messages):
    said = r"messages: expected a list of \{'role': …, 'content': …\}, or a list of such lists, got "
    with pytest.raises(RequestError, match=said + type(messages).__name__):
        engine.chat(messages, params())


@pytest.mark.parametrize(("messages", "said"), NO_CONVERSATION, ids=lambda value: str(value)[:20])
def test_a_message_without_role_or_content_is_refused_before_the_template_sees_it(engine, messages, said):
    with pytest.raises(RequestError, match=said):
        engine.chat(messages, params())
    with pytest.raises(RequestError, match=said):
        engine.stream_chat(messages, params())
    good = [{"role": "user", "content": "hi"}]
    refused, answered, no_list = engine.chat([messages, good, "hello"], params())
    assert re.search(said, refused.error)
    assert "expected a list of {'role': …, 'content': …}, got str 'hello'" in no_list.error
    assert answered.finish_reason == "length"


def test_an_assistants_calls_need_no_content_and_further_keys_are_the_templates(engine):
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", "thinking": "t", "other": 1},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    assert engine.chat(messages, params())[0].finish_reason == "length"
