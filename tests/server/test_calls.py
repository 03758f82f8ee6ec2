"""Tool calls and reasoning over HTTP: a fake model says what a message asks for, under a template as models have it."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import yaml
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.api.calls import AnswerReading
from mllm_compile.server.api.fields import ChatFields
from mllm_compile.text.calls.syntax import SpecialTokens
from tests.sample import sample_of
from tests.server.harness import Server, eventually, fake_server, running
from tests.text.calls import templates
from tests.text.calls.cases import syntax
from tests.tiny_model import shallow_tiny, tiny_config

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "One.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name in ("weather", "news")
]
ARGUMENTS = '{"place":  "K\u00f6ln", "days": 3.0 }'  # not as any JSON library writes them
LIMITS = {"max_model_len": 1024, "max_num_batched_tokens": 1024}


def call(name: str = "weather", arguments: str = ARGUMENTS) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


THINKING = "<think>\nWhat is asked?\n</think>\n\n"
SAID = {
    "text": "No call at all.",
    "call": call(),
    "two calls": "I ask both.\n" + call() + "\n" + call("news", "{}"),
    "thinking": THINKING + "It is warm.",
    "thinking, call": THINKING + call(),
    "no call": "<tool_call>\nnone of these",
}
# content, reasoning, calls, finish_reason
READ: dict[str, tuple[str | None, str | None, list[tuple[str, str]], str]] = {
    "text": ("No call at all.", None, [], "stop"),
    "call": (None, None, [("weather", ARGUMENTS)], "tool_calls"),
    "two calls": ("I ask both.", None, [("weather", ARGUMENTS), ("news", "{}")], "tool_calls"),
    "thinking": ("It is warm.", "What is asked?", [], "stop"),
    "thinking, call": (None, "What is asked?", [("weather", ARGUMENTS)], "tool_calls"),
    "no call": ("<tool_call>\nnone of these", None, [], "stop"),
}


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"SAY {text} END"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server(settings={"template": "QWEN3", "limits": LIMITS}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def read(message: Any) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    assert getattr(message, "reasoning", None) == getattr(message, "reasoning_content", None)
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content, getattr(message, "reasoning", None), calls


def streamed(chunks: Any) -> tuple[str | None, str | None, list[tuple[str, str]], str]:
    """The calls that a client assembles."""
    content, reasoning, calls, ids, reason = "", "", [], [], None
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        (choice,) = chunk.choices
        assert reason is None, "nothing follows the end"
        reason = choice.finish_reason
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                ids.append(part.id)
                calls.append((part.function.name, ""))
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + part.function.arguments)
    assert len(set(ids)) == len(calls)
    assert all(ids)
    return content or None, reasoning or None, calls, reason


@pytest.mark.parametrize("kind", SAID)
def test_calls_and_reasoning_are_read_and_streamed_as_they_are_not_streamed(client, kind):
    fields = {"model": "fake", "messages": say(SAID[kind]), "tools": TOOLS, "max_tokens": 300}
    whole = client.chat.completions.create(**fields)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    choice = whole.choices[0]
    assert (*read(choice.message), choice.finish_reason) == READ[kind]
    for interval in (1, 7):
        chunks = client.chat.completions.create(stream=True, extra_body={"stream_interval": interval}, **fields)
        assert streamed(chunks) == READ[kind]


@pytest.mark.parametrize(("kind", "most"), sample_of([*itertools.product(SAID, range(1, 60, 3))], 20))
def test_an_answer_that_is_cut_is_streamed_as_it_is_not_streamed(client, kind, most):
    fields = {"model": "fake", "messages": say(SAID[kind]), "tools": TOOLS, "max_tokens": most}
    choice = client.chat.completions.create(**fields).choices[0]
    content, reasoning, calls = read(choice.message)
    told = streamed(client.chat.completions.create(stream=True, **fields))
    assert told == (content or None, reasoning, calls, choice.finish_reason)
    assert (choice.finish_reason == "length") == (choice.finish_reason != READ[kind][3])


def test_without_tools_a_call_is_content_and_reasoning_is_read_all_the_same(client):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        told = client.chat.completions.create(model="fake", messages=say(THINKING + call()), max_tokens=300, **fields)
        assert read(told.choices[0].message) == (call(), "What is asked?", [])


def test_reasoning_can_be_left_out(server):
    body = {"messages": say(SAID["thinking"]), "include_reasoning": False, "max_tokens": 300}
    message = server.post(CHAT, body).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "It is warm.", "refusal": None}
    events = server.post(CHAT, body | {"stream": True}).events
    assert all("reasoning" not in event["choices"][0]["delta"] for event in events if event)


def test_an_answer_is_over_after_one_call_where_more_are_not_wanted(server):
    body = {"messages": say(call() + " on and on" * 60), "tools": TOOLS, "parallel_tool_calls": False}
    before = server.figure("mllm:generated_tokens_total")
    for is_stream in (False, True):
        told = server.post(CHAT, body | {"max_tokens": 400, "stream": is_stream, "return_token_ids": True})
        choice = told.events[-2]["choices"][0] if is_stream else told.json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        if not is_stream:
            assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [ARGUMENTS]
            assert told.json["usage"]["completion_tokens"] < 80
    eventually(lambda: server.figure("mllm:requests_running") == 0)
    assert server.figure("mllm:generated_tokens_total") - before < 300, "the engine has stopped"


def test_a_named_tool_is_called_once(server):
    body = {"messages": say(SAID["two calls"]), "tools": TOOLS, "max_tokens": 300}
    body["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    choice = server.post(CHAT, body).json["choices"][0]
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_calls_of_allowed_tools_become_a_form_of_these_alone(server, mode):
    # The fake refuses a form that names this tool.
    names = ("weather", "refused")
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    body = {"messages": say("x"), "tools": tools, "max_tokens": 4}
    answers = []
    for name in names:
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        answers.append(server.post(CHAT, {**body, "tool_choice": choice}).status)
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name}]}
        flat = [{"type": "function", "name": one} for one in names]
        answers.append(server.post("/v1/responses", {"input": say("x"), "tools": flat, "tool_choice": choice}).status)
    assert answers == [200, 200, 400, 400]


OFF = [{"enable_thinking": False}, {"thinking": False}, {"reasoning_effort": "none"}]


@pytest.mark.parametrize("options", OFF)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "news"}}])
def test_where_thinking_is_switched_off_a_forced_call_spends_no_tokens_on_it(options, choice):
    tools = [{"type": "function", "function": {"name": "news"}}]

    def form(prompt="<|im_start|>assistant\n", **fields):
        special = SpecialTokens(frozenset(), frozenset())
        facts: Any = SimpleNamespace(syntax=syntax("QWEN3"), special_tokens=special, marks={})
        asked = ChatFields(messages=say("x"), tools=tools, tool_choice=choice, **fields)
        return AnswerReading(facts, asked, prompt, SamplingParams()).params.structured_outputs.text

    assert "<think>" in form() and "</think>" in form("<|im_start|>assistant\n<think>\n", chat_template_kwargs=options)
    assert "think" not in form(chat_template_kwargs=options)
    assert "think" not in form("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_calls_whose_marks_are_special_tokens_are_read_and_other_special_tokens_are_not_shown():
    special = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<pad>"]
    kinds = {**SAID, "call": "<pad>" + call() + "<pad>"}
    with (
        fake_server(settings={"template": "QWEN3", "limits": LIMITS, "special_tokens": special}) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        ids = server.post("/tokenize", {"prompt": "<tool_call>"}).json["tokens"]
        assert len(ids) == 1
        plain = server.complete(prompt=say("<tool_call> x")[0]["content"] + "<|im_start|>assistant\n", max_tokens=9)
        assert plain.json["choices"][0]["text"].strip() == "x", "a mark that nobody reads is not shown"
        for kind, text in kinds.items():
            fields = {"model": "fake", "messages": say(text), "tools": TOOLS, "max_tokens": 300}
            choice = client.chat.completions.create(**fields).choices[0]
            assert (*read(choice.message), choice.finish_reason) == READ[kind]
            assert streamed(client.chat.completions.create(stream=True, **fields)) == READ[kind]


def test_tools_results_and_earlier_calls_go_through_the_template(server):
    messages = [
        {"role": "user", "content": "Is it warm?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "20 degrees"},
    ]
    ids = server.post("/tokenize", {"messages": messages, "tools": TOOLS}).json["tokens"]
    text = server.post("/detokenize", {"tokens": ids}).json["prompt"]
    assert '"name": "news"' in text
    assert "<tool_response>\n20 degrees" in text
    assert "Köln" in text or "K\\u00f6ln" in text
    messages += [{"role": "assistant", "content": "Yes."}, *say(call("news", "{}"))]
    told = server.post(CHAT, {"messages": messages, "tools": TOOLS, "max_tokens": 100}).json["choices"][0]
    assert told["message"]["tool_calls"][0]["function"] == {"name": "news", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "expected 'none', 'auto', 'required'"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "has the name of tool 0"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "none beside tools"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "none beside"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "expected `bool"),
    ],
)
def test_tools_are_refused_by_the_fields_name(server, fields, param, says):
    answer = server.post(CHAT, {"messages": say("x"), **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert says in answer.error["message"]


def test_the_banner_says_how_calls_are_written(server):
    eventually(lambda: "tools: recognised (by the template: <tool_call>" in server.said)


def test_reasoning_that_the_prompt_has_begun_is_told_apart_unless_the_answer_has_a_form():
    settings = {"template": "QWEN3_THINKING", "header": "<|im_start|>assistant\n<think>\n", "limits": LIMITS}
    with fake_server(settings=settings) as server:
        body = {"messages": say("Warm?\n</think>\n\nIt is."), "max_tokens": 300}
        message = server.post(CHAT, body).json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Warm?", "It is.")
        events = [event["choices"][0]["delta"] for event in server.post(CHAT, body | {"stream": True}).events if event]
        assert "".join(delta.get("reasoning", "") for delta in events) == "Warm?"
        assert "".join(delta.get("content", "") for delta in events) == "It is."
        formed = server.post(CHAT, {"messages": say("{}"), "response_format": {"type": "json_object"}})
        assert formed.json["choices"][0]["message"] == {"role": "assistant", "content": "{}", "refusal": None}


SPECIAL = 1  # the embedded model's one special token that ends no answer


@pytest.fixture(scope="module", params=["text", "special"])
def caller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A layer of the embedded model, whose words mean nothing, under a template for tools; calls may open with a
    special token."""
    model = shallow_tiny(tmp_path_factory.mktemp("tools") / "model")
    if request.param == "special":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            text = (model / name).read_text(encoding="utf-8")
            (model / name).write_text(text.replace('"<|im_start|>"', '"<tool_call>"'), encoding="utf-8")
    (model / "chat_template.jinja").write_text(templates.QWEN25)
    config = tiny_config(model / "cache", compile={"backend": "eager"}, model={"path": str(model)})
    load_or_compile(config)  # here, where Transformers is imported: a third of the seconds that the server would take
    path = model / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-m", "mllm_compile", "serve", str(path), "--port", "0"]
    with (
        running(command, model / "log") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_a_call_that_is_required_is_one_of_the_tools_schema(caller, choice, request):
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "pick", "parameters": schema}}]
    told = caller.chat.completions.create(
        model=caller.models.list().data[0].id,
        messages=say("x"),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=400,
        temperature=0,
        extra_body={"return_token_ids": True},
    ).choices[0]
    assert told.finish_reason == "tool_calls", told
    (made,) = told.message.tool_calls
    assert made.function.name == "pick"
    assert json.loads(made.function.arguments)["size"] in ("small", "large")
    assert told.token_ids.count(SPECIAL) == (1 if request.node.callspec.params["caller"] == "special" else 0)


def test_a_tool_whose_schema_cannot_be_held_to_is_refused_by_the_fields_name(server):
    tools = [{"type": "function", "function": {"name": "refused"}}]
    answer = server.post(CHAT, {"messages": say("x"), "tools": tools, "tool_choice": "required"})
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "structural_tag is refused" in answer.error["message"]
