"""Bodies of all kinds: no answer is an internal error, and the engine lives on."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from mllm_compile.server.api import fields
from tests.hang_guard import HANG_S
from tests.sample import how_to_repeat, seed
from tests.server.harness import Server, fake_server

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/abort")
NAMES = sorted(
    {*fields.CompletionFields.__struct_fields__, *fields.ChatFields.__struct_fields__, *fields._REFUSED, "no_such"}
)
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e300, 2**31, 2**63, -(2**63), 10**30, "", "a", "é☕", "\x00", "\ud800",
    "1",    "x" * 3000, [], [[]], [1, 2], [0] * 600, ["a", "b"], ["a", 1], [[1, 2], [3]], [None], [-1], {}, {"a": 1},
    {"0": 1}, {"1": "b"}, [{}], [{"role": "user", "content": "hi"}], [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": 1}], {"include_usage": True},
    {"type": "json_object"}, "auto", [[[1]]], {"enable_thinking": True}, {"add_generation_prompt": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server(settings={"delay_s": 0.0}) as server:
        yield server


def random_body(rng: random.Random) -> bytes:
    if rng.random() < 0.05:
        return rng.randbytes(rng.randint(0, 60))
    body: dict[str, Any] = {}
    if rng.random() < 0.8:
        body |= {"prompt": "def", "messages": [{"role": "user", "content": "hi"}], "tokens": [5, 6], "max_tokens": 2}
    for name in rng.sample(NAMES, rng.randint(0, 4)):
        body[name] = rng.choice(ODD)
    if body.get("max_tokens") is None or not isinstance(body["max_tokens"], int) or body["max_tokens"] > 9:
        body["max_tokens"] = rng.choice([1, 2, 0, -1, "2"])  # what it asks for is to be answered soon
    data = json.dumps(body).encode()
    if rng.random() < 0.05:
        cut = rng.randrange(len(data))
        data = data[:cut] + rng.randbytes(3) + data[cut + rng.randint(0, 5) :]
    return data


def run(server: Server, count: int) -> None:
    rng = random.Random(seed())
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    statuses = set()
    for _ in range(count):
        path, body = rng.choice(PATHS), random_body(rng)
        connection.request("POST", path, body)
        response = connection.getresponse()
        answer = response.read()
        statuses.add(response.status)
        assert response.status < 500, f"{path} {body!r}: {answer!r}; {how_to_repeat()}"
        if response.status != 200:
            assert json.loads(answer)["error"]["message"], body
    assert {200, 400} <= statuses
    assert "Traceback" not in server.said
    assert server.figure("mllm:engine_restarts_total") == 0
    assert server.figure("mllm:requests_waiting") == 0
    assert server.complete().status == 200


def test_no_body_is_an_internal_error(server):
    run(server, 400)


@pytest.mark.slow
def test_none_of_ten_thousand_bodies_is_an_internal_error(server):
    run(server, 10_000)
