"""The embedded model through HTTP against the same engine in process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams

PROMPTS = ["Return a new list containing", 'The "for" statement is used to iterate over', "é ☕"]


@pytest.fixture(scope="module")
def engine(tiny_yaml: Path) -> Iterator[Engine]:
    with Engine(str(tiny_yaml)) as engine:
        yield engine


def in_process(engine: Engine, prompt: Any, **fields: Any) -> Any:
    params = dataclasses.replace(engine.default_params, **{"max_tokens": None, **fields})
    return engine.generate(prompt, params)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "max_tokens": 24},
        {"temperature": 1.0, "seed": 7, "max_tokens": 24, "top_p": 0.9},
        {"temperature": 0, "max_tokens": 40, "stop": [" a", "e "]},
        {"temperature": 0.8, "seed": 3, "n": 3, "max_tokens": 16, "stop": ["e"], "min_tokens": 4},
        {
            "temperature": 0,
            "max_tokens": 30,
            "repetition_penalty": 1.3,
            "include_stop_str_in_output": True,
            "stop": "t",
        },
    ],
)
def test_a_served_text_is_the_engines_own(tiny_server, engine, fields):
    for prompt in PROMPTS:
        expected = in_process(engine, prompt, **fields)[0]
        choices = tiny_server.post("/v1/completions", {"prompt": prompt, **fields}).json["choices"]
        assert [choice["text"] for choice in choices] == [output.text for output in expected.outputs]
        assert [choice["finish_reason"] for choice in choices] == [output.finish_reason for output in expected.outputs]
        assert [choice["stop_reason"] for choice in choices] == [output.stop_reason for output in expected.outputs]


def test_a_served_chat_is_the_engines_own(tiny_server, engine):
    messages = [{"role": "user", "content": "What does shutil.copytree do?"}]
    expected = engine.chat(messages, SamplingParams(temperature=0, max_tokens=16))[0]
    told = tiny_server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 16}).json
    assert told["choices"][0]["message"]["content"] == expected.text
    assert told["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_loglikelihoods_as_an_evaluation_asks_for_them_are_the_engines_own(tiny_server, engine):
    """A list of lists of ids, echoed with their log-probabilities and one token: lm_eval's local-completions."""
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choices = tiny_server.post("/v1/completions", body).json["choices"]
    expected = in_process(engine, ids, max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1)
    for choice, output in zip(choices, expected, strict=True):
        told = choice["logprobs"]["token_logprobs"]
        wanted = [
            entry[token].logprob
            for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        wanted.append(output.logprobs[0][output.token_ids[0]].logprob)
        assert told[0] is None
        assert told[1:] == pytest.approx(wanted, abs=1e-4)
        last = choice["logprobs"]["top_logprobs"][-1]
        assert max(last.values()) == told[-1], "the token that was chosen greedily is the likeliest"


def test_the_models_own_defaults_hold_for_fields_that_are_absent(tiny_server, engine):
    told = tiny_server.post("/v1/completions", {"prompt": PROMPTS[0], "seed": 5, "max_tokens": 12}).json
    expected = in_process(engine, PROMPTS[0], seed=5, max_tokens=12)[0]
    assert told["choices"][0]["text"] == expected.text


def test_the_banner_names_what_was_decided(tiny_server):
    assert "KV tokens" in tiny_server.said
    assert f"ready     {tiny_server.url}/v1" in tiny_server.said
    assert "8 running, 32 waiting" in tiny_server.said
    assert tiny_server.get("/v1/models").json["data"][0]["id"] == "tiny"
