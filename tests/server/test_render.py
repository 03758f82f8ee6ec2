"""The render endpoints tell the prompts that requests of the same bodies have."""

from __future__ import annotations

import pytest

from tests.server.harness import fake_server

CHAT = {"messages": [{"role": "system", "content": "Say it."}, {"role": "user", "content": "é ☕ and more"}]}
GENERATE_REQUEST = {
    "request_id", "token_ids", "model", "features", "sampling_params", "stream", "cache_salt", "priority",
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with fake_server() as server:
        yield server


def prompts(server, path, body):
    """The ids that an answer of the same body was made from."""
    answer = server.post(path, {**body, "max_tokens": 1, "return_token_ids": True})
    assert answer.status == 200, answer.body
    choices = answer.json["choices"]
    found = [choice.get("prompt_token_ids") for choice in choices]
    return found if None not in found else [answer.json["prompt_token_ids"]]


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        {**CHAT, "add_generation_prompt": False},
        {"messages": [*CHAT["messages"], {"role": "assistant", "content": "So"}], "continue_final_message": True},
        {"messages": [], "input_ids": [5, 6, 7]},
    ],
)
def test_a_chat_is_one_request_with_the_ids_that_it_is_answered_from(server, body):
    told = server.post("/v1/chat/completions/render", body).json
    assert set(told) == GENERATE_REQUEST
    assert [told["token_ids"]] == prompts(server, "/v1/chat/completions", body)
    assert told["request_id"].startswith("chatcmpl-") and told["model"] == "fake"


@pytest.mark.parametrize(
    "prompt", ["def f():", ["def f():", "é ☕"], [1, 2, 3], [[1, 2], [3]]], ids=["text", "texts", "ids", "lists"]
)
def test_completions_are_a_list_with_a_request_for_each_prompt(server, prompt):
    told = server.post("/v1/completions/render", {"prompt": prompt, "truncate_prompt_tokens": 4}).json
    asked = {"prompt": prompt, "truncate_prompt_tokens": 4}
    assert [one["token_ids"] for one in told] == prompts(server, "/v1/completions", asked)
    assert all(set(one) == GENERATE_REQUEST for one in told)
    assert len({one["request_id"] for one in told}) == len(told)


def test_parameters_are_those_that_differ_from_their_defaults(server):
    body = {**CHAT, "temperature": 0.5, "max_tokens": 7, "stop": ["x"], "logit_bias": {"5": 1.0}, "priority": 3}
    body |= {"request_id": "mine", "cache_salt": "s", "stream": True, "colour": 1}
    answer = server.post("/v1/chat/completions/render", body)
    told = answer.json
    given = {"temperature": 0.5, "max_tokens": 7, "stop": ["x"], "logit_bias": {"5": 1.0}}
    assert told["sampling_params"].items() >= given.items()
    assert (told["request_id"], told["cache_salt"], told["priority"], told["stream"]) == ("chatcmpl-mine", "s", 3, True)
    assert answer.headers["x-mllm-ignored"] == "colour"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", {}, 400, "prompt: it is missing"),
        ("completions", {"prompt": "a", "model": "x"}, 404, "the model 'x' does not exist"),
        ("completions", {"prompt": [10**9]}, 400, "10"),
        ("completions", {"prompt": "a " * 4000}, 400, "the model's context is 512 tokens"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "a", "request_id": 5}, 400, "request_id"),
        ("completions", {"prompt": "a", "priority": 1 << 70}, 400, "priority"),
        ("chat/completions", b"{", 400, "the body is no JSON"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            400,
            "messages: expected texts",
        ),
    ],
)
def test_what_is_refused_is_refused_as_the_request_would_be(server, path, body, status, message):
    answer = server.post(f"/v1/{path}/render", body)
    assert (answer.status, message in answer.error["message"]) == (status, True), answer.body
