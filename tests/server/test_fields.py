"""Each field of a request works, is refused by its name, or is named as ignored."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.api.fields import read_fields
from mllm_compile.server.api.interfaces import CompletionRequest
from mllm_compile.server.endpoints import ENDPOINTS
from mllm_compile.server.front import Front
from mllm_compile.server.options import ServeOptions
from tests.fakes import ByteTokenizer
from tests.hang_guard import until
from tests.server.harness import Server, fake_server

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "def"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server() as server:
        yield server


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": 0}, "max_tokens", "expected an integer of at least 1 or null, got 0."),
        ({"max_tokens": "8"}, "max_tokens", "expected an integer"),
        ({"temperature": "hot"}, "temperature", "expected a number"),
        ({"n": 2, "temperature": 0}, "n", "1 when temperature is 0"),
        ({"n": 5000}, "n", "at most|from 1 to 1024"),
        ({"stream": 1}, "stream", "expected `bool"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage", "expected `bool"),
        ({"stream_options": {}}, "stream_options", "with stream: true"),
        ({"priority": 10**30}, "priority", "expected an integer of 64 bits"),
        ({"seed": "x"}, "seed", "expected an integer from -9223372036854775808 to 18446744073709551615"),
        ({"best_of": 3}, "best_of", "number of answers"),
        ({"stop": ""}, "stop", "texts that are not empty"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias", "token ids under"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "at least 0"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20, got 21"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not in a stream"),
        ({"request_id": "a b"}, "request_id", "printable ASCII"),
        ({"prompt": ""}, "prompt", "empty text"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [10**9]}, "prompt", "expected ids from 0"),
        ({"prompt": {"a": 1}}, "prompt", "expected a text"),
        ({"prompt": [["a"]]}, "prompt", "integers"),
        ({"prompt": None}, "prompt", "expected a text"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"stream_interval": 0}, "stream_interval", "at least 1"),
        ({"suffix": "x"}, "suffix", "not filled in"),
        ({"use_beam_search": True}, "use_beam_search", "no beam search"),
        ({"response_format": {"type": "json"}}, "response_format", "an object whose type is one of text, json_object"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "exactly one of .*, got none"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "exactly one of .*, got regex and choice"),
        ({"guided_regex": "refused"}, "guided_regex", "regex is refused"),
        ({"structured_outputs": {"choice": ["refused"]}}, "structured_outputs", "choice is refused"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "Did you mean regex"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "none beside structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "structured_outputs", "expected one form"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", "token ids"),
    ],
)
def test_a_completion_is_refused_by_the_fields_name(server, fields, param, says):
    answer = server.post("/v1/completions", {"prompt": "def", "max_tokens": 4, **fields})
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert re.search(says, answer.error["message"]), answer.error


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "no messages"),
        ({"messages": "hi"}, "messages", "expected `array`"),
        ({"messages": [{"content": "x"}]}, "messages", "has no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools", "expected 'function', the only type there is"),
        ({"tool_choice": "required"}, "tool_choice", "'required' without tools"),
        ({"functions": [{"name": "f"}]}, "functions", "has become tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "an object with a schema"),
        ({"response_format": {"type": "json_schema", "schema": {"title": "refused"}}}, "response_format", "is refused"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "template is code"),
        ({"chat_template_kwargs": {"messages": []}}, "messages", "field of its own"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"modalities": ["audio"]}, "modalities", "only text"),
        ({"max_completion_tokens": 0}, "max_tokens", "at least 1"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "without"),
    ],
)
def test_a_chat_is_refused_by_the_fields_name(server, fields, param, says):
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 4, **fields})
    assert answer.status == 400, answer.body
    assert param is None or answer.error["param"] == param
    assert says in answer.error["message"], answer.error


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"prompt": "hi"}, "messages"),
        ("/v1/completions", {"messages": HELLO}, "messages"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/messages", {"max_tokens": 4}, "messages"),
        ("/v1/messages", {"messages": HELLO}, "max_tokens"),
        ("/v1/responses", {}, "input"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_a_field_that_is_missing_is_named(server, path, fields, param):
    answer = server.post(path, fields)
    assert answer.status == 400, answer.body
    error = answer.error
    assert error["message"].startswith(f"{param}: ") and error.get("param", param) == param, error


def test_a_key_of_a_wrong_type_is_no_field_that_is_missing():
    class Fields(msgspec.Struct):
        weights: dict[int, float]

    with pytest.raises(ApiError) as refused:
        read_fields(Fields, b'{"weights": {"a": 1}}')
    assert refused.value.message == "Expected `int`, got `str` - at `key` in `$.weights`"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "guided_json_object": False},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"temperature": None, "stop": None, "tools": None, "n": None, "logit_bias": None},
        {"best_of": 1, "use_beam_search": False, "include_reasoning": True, "modalities": ["text"]},
        {"seed": -5, "logit_bias": {"65": 5}, "top_k": -1, "min_p": 0.1, "bad_words": ["x"]},
        {"priority": 3, "cache_salt": "s", "request_id": "mine", "stream_interval": 2},
        {"model": "fake", "max_completion_tokens": 2},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    ],
)
def test_fields_that_ask_for_nothing_else_are_taken(server, fields):
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 2, **fields})
    assert answer.status == 200, answer.body
    assert "x-mllm-ignored" not in answer.headers


def test_an_unknown_field_is_named_in_a_header(server):
    answer = server.complete(no_such=1, frobnicate=None)
    assert answer.status == 200
    assert answer.headers["x-mllm-ignored"] == "no_such,frobnicate"


def test_a_strict_server_refuses_what_would_change_nothing():
    with fake_server({"is_strict": True}) as server:
        answer = server.complete(no_such=1)
        unread = server.post(CHAT, {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}})
    assert answer.status == unread.status == 400
    assert answer.error["param"] == "no_such"
    assert unread.error["param"] == "chat_template_kwargs.enable_thinking"
    assert "a chat template that reads no such variable, and is strict" in unread.error["message"]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False, "self": 1}}, ("enable_thinking", "self")),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "auto", "no_such": 1}, "no_such,tools"),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
        ({"chat_template_kwargs": {}, "documents": None}, None),
    ],
)
def test_what_the_chat_template_does_not_read_is_left_out_and_named_in_a_header(server, fields, ignored):
    plain = server.post(CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 4, "return_token_ids": True})
    answer = server.post(
        CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 4, "return_token_ids": True, **fields}
    )
    if isinstance(ignored, tuple):
        ignored = ",".join(f"chat_template_kwargs.{name}" for name in ignored)
    assert (answer.status, answer.headers.get("x-mllm-ignored")) == (200, ignored)
    choice, expected = answer.json["choices"][0], plain.json["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (expected["prompt_token_ids"], expected["token_ids"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "needs a model whose calls can be told"),
        ({"chat_template_kwargs": {"messages": []}}, "is a field of its own"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "is a field of its own"),
    ],
)
def test_what_could_change_the_answer_is_refused_whatever_the_template_reads(server, fields, says):
    answer = server.post(CHAT, {"messages": HELLO, **fields})
    assert answer.status == 400 and says in answer.error["message"]


def test_prompts_are_answered_in_their_order(server):
    answer = server.complete(prompt=["def", "class", [5, 6, 7]], temperature=0, max_tokens=3, return_token_ids=True)
    alone = [
        server.complete(prompt=prompt, temperature=0, max_tokens=3).json["choices"][0]["text"]
        for prompt in ("def", "class", [5, 6, 7])
    ]
    assert [choice["text"] for choice in answer.json["choices"]] == alone
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
    assert answer.json["choices"][2]["prompt_token_ids"] == [5, 6, 7]
    assert all(len(choice["token_ids"]) == 3 for choice in answer.json["choices"])


def test_one_bad_prompt_of_a_list_refuses_the_request(server):
    answer = server.complete(prompt=["def", ""])
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert server.figure("mllm:requests_waiting") == 0


def test_a_prompt_is_cut_from_its_begin(server):
    answer = server.complete(prompt=[5, 6, 7, 8], truncate_prompt_tokens=2, return_token_ids=True)
    assert answer.json["choices"][0]["prompt_token_ids"] == [7, 8]


def test_an_answer_may_go_on_from_the_last_message(server):
    messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    ids = server.post("/tokenize", {"messages": messages, "continue_final_message": True}).json["tokens"]
    text = server.post("/detokenize", {"tokens": ids}).json["prompt"]
    assert text.endswith("Once upon")
    answer = server.post(CHAT, {"messages": messages, "continue_final_message": True, "max_tokens": 2})
    assert answer.json["usage"]["prompt_tokens"] == len(ids)
    for content in ("im", "e", "", [{"type": "text", "text": "end"}]):  # <|im_end|> has each of them
        messages[-1]["content"] = content
        ids = server.post("/tokenize", {"messages": messages, "continue_final_message": True}).json["tokens"]
        text = server.post("/detokenize", {"tokens": ids}).json["prompt"]
        assert text.endswith(f"<|im_start|>assistant\n{content if isinstance(content, str) else 'end'}")


def test_without_max_tokens_a_chat_has_the_rest_of_the_context_and_a_completion_16_tokens(server):
    answer = server.post(CHAT, {"messages": HELLO, "ignore_eos": True}).json
    assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (512, "length")
    for most, asked in (
        (16, {}),
        (16, {"max_tokens": None}),
        (5, {"max_completion_tokens": 5}),
        (40, {"max_tokens": 40}),
    ):
        answer = server.post("/v1/completions", {"prompt": "def", "ignore_eos": True, **asked}).json
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (most, "length")


def test_a_request_carries_its_own_name(server):
    answer = server.complete(request_id="job-7")
    assert answer.json["id"] == "cmpl-job-7"
    assert answer.headers["x-request-id"] == "cmpl-job-7"
    by_header = server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, {"x-request-id": "h1"})
    assert by_header.json["id"] == "cmpl-h1"


def test_prompt_logprobs_come_by_token(server):
    answer = server.complete(prompt=[5, 6, 7], prompt_logprobs=1).json
    first, second, third = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["6"]["logprob"] == -6.0
    assert set(third) == {"7"}  # the likeliest of the fake is 7 itself


def test_tokens_can_be_named_by_their_ids(server):
    answer = server.complete(logprobs=0, return_tokens_as_token_ids=True, return_token_ids=True).json["choices"][0]
    assert answer["logprobs"]["tokens"] == [f"token_id:{token}" for token in answer["token_ids"]]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"nul", b"\xff", b"[" * 100_000, b'{"prompt": NaN}'])
def test_a_body_that_is_no_json_object_is_refused(server, body):
    for path in ("/v1/completions", CHAT, "/tokenize", "/detokenize", "/v1/abort"):
        answer = server.ask("POST", path, body)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("headers", [{"content-encoding": "gzip"}, {"content-encoding": "br"}, {}])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/tokenize", "/v1/abort"])
def test_a_compressed_body_is_refused_as_one(server, path, headers):
    answer = server.ask("POST", path, gzip.compress(b'{"prompt": "def"}'), headers)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")
    assert "as it is" in answer.error["message"]
    plain = server.ask("POST", path, b"{}", {"content-encoding": "identity"})
    assert plain.status in (200, 400)


def test_a_body_that_is_too_large_is_refused(server):
    answer = server.ask("POST", "/v1/completions", b'{"prompt": "' + b"x" * (16 << 20) + b'"}')
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def test_tokenize_and_detokenize_are_each_others_inverse(server):
    for prefix in ("", "/v1"):
        told = server.post(prefix + "/tokenize", {"prompt": "def f(x):", "return_token_strs": True}).json
        assert "".join(told["token_strs"]) == "def f(x):"
        assert told["count"] == len(told["tokens"])
        assert server.post(prefix + "/detokenize", {"tokens": told["tokens"]}).json["prompt"] == "def f(x):"
    assert server.post("/detokenize", {"tokens": [10**7]}).error["param"] == "tokens"


class NotedTokenizer(ByteTokenizer):
    """Notes the threads that ask for the bytes of a token."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def bytes_of_token(self, token_id: int) -> bytes:
        self.threads.add(threading.current_thread().name)
        return bytes([token_id])


def test_the_texts_of_a_prompts_tokens_are_not_made_in_the_event_loop(monkeypatch):
    front, tokenizer, sent = Front(ServeOptions(model="m"), lambda *args: []), NotedTokenizer(), []

    async def facts(model: str | None) -> Any:
        return SimpleNamespace(tokenizer=tokenizer, hello=SimpleNamespace(max_model_len=64))

    bodies = [b'{"prompt": "def", "return_token_strs": true}']

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bodies.pop()} if bodies else await asyncio.Event().wait()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    monkeypatch.setattr(front, "facts", facts)
    (endpoint,) = (make for method, path, make in ENDPOINTS if (method, path) == ("POST", "/tokenize"))
    asyncio.run(endpoint(front)({"headers": []}, receive, send))
    assert json.loads(sent[1]["body"])["token_strs"] == ["d", "e", "f"]
    assert threading.current_thread().name not in tokenizer.threads


@pytest.mark.parametrize(
    ("fields", "is_quick"),
    [
        ({"prompt": "def"}, True),
        ({"prompt": list(range(512))}, True),
        ({"prompt": "def " * 300}, False),
        ({"prompt": list(range(9000))}, False),
        ({"prompt": [5], "bad_words": ["word"] * 200}, False),
    ],
)
def test_only_what_takes_no_time_is_planned_in_the_event_loop(fields, is_quick):
    assert CompletionRequest(json.dumps(fields).encode()).is_quick is is_quick


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_streamed_chunks_have_the_text_and_the_ids_of_the_whole_answer(server, path):
    asked = {"max_tokens": 24, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    asked |= {"messages": HELLO} if path == CHAT else {"prompt": "def"}
    whole = server.post(path, asked).json["choices"][0]
    chunks = [event["choices"][0] for event in server.post(path, asked | {"stream": True}).events if event]
    assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == whole["token_ids"]
    if path == CHAT:
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
    else:
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]


def test_a_model_without_a_tokenizer_answers_ids_with_ids():
    asked = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    with fake_server(settings={"has_tokenizer": False}) as server:
        # The banner's lines come when the engine is ready, as `/ready` says too.
        until(lambda: "no tokenizer: completions of token ids only" in server.said, "the banner")
        whole = server.post("/v1/completions", asked).json["choices"][0]
        events = server.post("/v1/completions", {**asked, "stream": True}).events
        bare = server.post("/v1/completions", {**asked, "return_token_ids": False}).json["choices"][0]
        refused = (
            server.complete(prompt="def"),
            server.post(CHAT, {"messages": HELLO}),
            server.complete(prompt=[5], stop="x"),
        )
    assert (whole["text"], len(whole["token_ids"])) == ("", 4)
    chunks = [event["choices"][0] for event in events if event]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    assert len(chunks) == 4  # one a token
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [asked["prompt"], None, None, None]
    assert "token_ids" not in bare
    assert all((answer.status, "no tokenizer" in answer.error["message"]) == (400, True) for answer in refused)
