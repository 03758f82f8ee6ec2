"""The server as OpenAI's own Python client sees it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.sample import sample_of
from tests.server.harness import Server, eventually, fake_server

PROMPTS = ["def", "Return a new list", "naïve café ☕ 日本語", "x" * 200, "for i in", "\n\n\t"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server(settings={"limits": {"max_running_requests": 16}}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def random_fields(seed: int) -> dict[str, Any]:
    """Sampling fields that any request may have."""
    rng = random.Random(seed)
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "seed": seed, "extra_body": {}}
    if rng.random() < 0.5:
        fields |= {"n": rng.randint(1, 3), "temperature": 1}
    else:
        fields["temperature"] = 0
    if rng.random() < 0.5:
        fields["stop"] = rng.sample(["e", "th", " a", "é", "()", "re"], rng.randint(1, 3))
        fields["extra_body"] |= {"include_stop_str_in_output": rng.random() < 0.5, "min_tokens": rng.randint(0, 1)}
    if rng.random() < 0.3:
        fields["extra_body"] |= {"ignore_eos": True}
    if rng.random() < 0.3:
        fields["extra_body"] |= {"skip_special_tokens": False}
    if rng.random() < 0.3:
        fields["extra_body"] |= {"stream_interval": rng.randint(1, 5)}
    return fields


@pytest.mark.parametrize("seed", sample_of(range(200), 24))
def test_a_streamed_chat_is_the_chat_that_is_not_streamed(client, seed):
    fields = random_fields(seed)
    if seed % 3 == 0:
        fields |= {"logprobs": True, "top_logprobs": seed % 4}
    messages = [{"role": "user", "content": PROMPTS[seed % len(PROMPTS)]}]
    whole = client.chat.completions.create(model="fake", messages=messages, **fields)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)

    texts, scores, reasons, usage = {}, {}, {}, None
    for chunk in client.chat.completions.create(
        model="fake", messages=messages, stream=True, stream_options={"include_usage": True}, **fields
    ):
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.logprobs is not None:
                scores.setdefault(choice.index, []).extend(choice.logprobs.content)
            if choice.finish_reason is not None:
                assert choice.index not in reasons, "one end each"
                reasons[choice.index] = choice.finish_reason

    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    if "logprobs" in fields:
        assert scores == {choice.index: choice.logprobs.content for choice in whole.choices if choice.logprobs.content}


@pytest.mark.parametrize("seed", sample_of(range(1000, 1200), 16))
def test_a_streamed_completion_is_the_one_that_is_not_streamed(client, seed):
    fields = random_fields(seed)
    fields |= {"logprobs": seed % 3, "echo": seed % 2 == 0} if seed % 4 else {}
    rng = random.Random(seed)
    prompt = rng.choice([PROMPTS[seed % len(PROMPTS)], PROMPTS[:3], [5, 6, 7], [[5, 6, 7], [8, 9]]])
    whole = client.completions.create(model="fake", prompt=prompt, **fields)
    if not fields.get("echo"):  # its first token has null, as OpenAI's own answers had, and its types do not
        Completion.model_validate(whole.model_dump(), strict=True)

    texts, scores, reasons = {}, {}, {}
    for chunk in client.completions.create(model="fake", prompt=prompt, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs is not None:
                kept = scores.setdefault(choice.index, {})
                for name, values in choice.logprobs.model_dump().items():
                    kept[name] = kept.get(name, []) + values
            reasons[choice.index] = choice.finish_reason

    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    if "logprobs" in fields:
        assert scores == {choice.index: choice.logprobs.model_dump() for choice in whole.choices}


def test_the_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").max_model_len == 512


def test_a_mistake_is_the_error_class_that_the_client_has_for_it(client):
    with pytest.raises(openai.BadRequestError, match="temperature: expected a number from 0 to 100") as caught:
        client.completions.create(model="fake", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="this server has fake") as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt=[5] * 600)
    assert long.value.code == "context_length_exceeded"


def test_usage_in_each_chunk_grows_to_the_last(client):
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "def"}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            extra_body={"ignore_eos": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert chunks[-1].timing["steps"] == 8


def test_cached_tokens_are_told(client):
    prompt = list(range(40, 140))
    first, second = (client.completions.create(model="fake", prompt=prompt, max_tokens=1) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 96


def test_bytes_of_a_token_come_from_the_vocabulary(client):
    whole = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "é"}],
        max_tokens=64,
        temperature=0,
        logprobs=True,
        top_logprobs=0,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    choice = whole.choices[0]
    told = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert told.decode(errors="replace") == choice.message.content


def test_echo_of_a_prompt_alone_generates_nothing(client):
    answer = client.completions.create(model="fake", prompt="def f", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, answer.usage.completion_tokens) == ("def f", "length", 0)
    assert "".join(choice.logprobs.tokens) == "def f"
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset[0] == 0


def test_a_stop_text_ends_an_answer_and_is_named(client, server):
    answer = client.completions.create(
        model="fake", prompt="def", max_tokens=400, temperature=0, stop=["e"], extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "e"
    assert answer.usage.completion_tokens < 100
    eventually(lambda: server.figure("mllm:requests_running") == 0)
