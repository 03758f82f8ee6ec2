"""A server whose engine drafts: the answers of one without, and its figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import Server, fake_server


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    speculative = {"method": "ngram", "num_speculative_tokens": 4}
    with (
        fake_server(settings={"quick": True}) as plain,
        fake_server(settings={"quick": True, "speculative": speculative}) as drafted,
    ):
        yield plain, drafted


ASKED: list[dict[str, Any]] = [
    {"max_tokens": 90},
    {"max_tokens": 90, "stop": ["mapping"], "logprobs": 2},
    {"max_tokens": 90, "n": 2, "stop": ["of the"], "temperature": 1},
    {"max_tokens": 70, "logprobs": 1},
]


@pytest.mark.parametrize("asked", ASKED)
def test_answers_and_streams_are_those_without_drafts(servers, asked):
    plain, drafted = (server.complete(**asked).json["choices"] for server in servers)
    assert drafted == plain
    texts = {}
    events = servers[1].complete(**asked, stream=True).events
    for event in filter(None, events):
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in plain}


def test_usage_and_metrics_tell_of_drafts(servers):
    plain, drafted = servers
    assert "completion_tokens_details" not in plain.complete(max_tokens=90).json["usage"]
    details = drafted.complete(max_tokens=90).json["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 40
    assert details["rejected_prediction_tokens"] >= 0
    text = drafted.get("/metrics").body.decode()
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert f"vllm:spec_decode_num_{name}_total{{" in text
    assert re.search(r'^vllm:spec_decode_num_accepted_tokens_per_pos_total{[^}]*position="3"[^}]*} [1-9]', text, re.M)
