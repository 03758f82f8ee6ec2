"""Sessions over HTTP, by each name that clients have for them."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.server.harness import fake_server

PROMPT = "A prompt that is longer than a few pages of the cache, so that its second turn finds some of them. "
KEYS = ("key-one", "key-two")


@pytest.fixture(scope="module")
def server():
    with fake_server({"api_keys": list(KEYS)}) as server:
        yield server


def asked(server, body, headers=None, path="/v1/completions", key=KEYS[0]):
    answer = server.post(path, body, headers={"authorization": f"Bearer {key}", **(headers or {})})
    assert answer.status == 200, answer.body
    return answer


def session(server, name, method="GET", key=KEYS[0], query=""):
    return server.ask(method, f"/v1/sessions/{name}{query}", headers={"authorization": f"Bearer {key}"})


CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
WAYS = {
    "completions": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "session_id": "a1"}, {}),
    "a header": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, {"x-session-id": "a2"}),
    "chat": ("/v1/chat/completions", {**CHAT, "prompt_cache_key": "a3"}, {}),
    "responses": ("/v1/responses", {"input": PROMPT, "max_output_tokens": 2, "prompt_cache_key": "a4"}, {}),
    "messages": ("/v1/messages", {**CHAT, "session_id": "a5"}, {}),
    "both names": (
        "/v1/chat/completions",
        {**CHAT, "prompt_cache_key": "x", "session_id": "a6"},
        {"x-session-id": "y"},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_interface_names_a_session(server, way):
    path, body, headers = WAYS[way]
    name = f"a{list(WAYS).index(way) + 1}"
    for _ in range(2):
        asked(server, body, headers, path)
    state = session(server, name).json
    assert (state["id"], state["object"], state["turns"], state["running"]) == (name, "session", 2, 0)
    assert state["cached_tokens"] > 0 and state["kept_tokens"] > 0
    assert session(server, name, "DELETE").json["deleted"] is True
    assert session(server, name).status == 404 == session(server, name, "DELETE").status


def test_a_client_sees_and_ends_its_own_sessions_alone(server):
    asked(server, {"prompt": PROMPT, "max_tokens": 1, "session_id": "mine"})
    asked(server, {"prompt": PROMPT, "max_tokens": 1, "session_id": "mine", "cache_salt": "s"})
    assert session(server, "mine", key=KEYS[1]).status == 404
    assert session(server, "mine", "DELETE", key=KEYS[1]).status == 404
    assert session(server, "mine", query="?cache_salt=other").status == 404
    assert session(server, "mine").json["turns"] == 1
    assert session(server, "mine", "DELETE", query="?cache_salt=s").status == 200
    assert session(server, "mine").status == 200


@pytest.mark.parametrize(
    ("body", "headers", "said"),
    [
        ({"session_id": "x" * (1 << 20)}, {}, "session_id: expected a text of 1 to 256 characters, got 1,048,576"),
        ({"session_id": ""}, {}, "session_id: expected a text of 1 to 256 characters, got 0 characters"),
        ({"session_id": 7}, {}, "session_id: expected `str | null`, got `int`"),
        ({"prompt_cache_key": "x" * 257}, {}, "prompt_cache_key: expected a text of 1 to 256 characters"),
        ({"prompt_cache_retention": "7d"}, {}, "prompt_cache_retention: expected one of in_memory, "),
        ({}, {"x-session-id": "x" * 300}, "session_id: expected a text of 1 to 256 characters, got 300"),
    ],
)
def test_a_wrong_name_is_refused(server, body, headers, said):
    given = {"authorization": f"Bearer {KEYS[0]}", **headers}
    answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, **body}, headers=given)
    assert answer.status == 400 and said in answer.error["message"]


@pytest.mark.parametrize(
    "control", [{"type": "forever"}, {"type": "ephemeral", "ttl": "2h"}, {"type": "ephemeral", "x": 1}]
)
def test_a_wrong_cache_control_is_refused(server, control):
    system = [{"type": "text", "text": "x", "cache_control": control}]
    given = {"authorization": f"Bearer {KEYS[0]}"}
    answer = server.post("/v1/messages", {**CHAT, "system": system}, headers=given)
    assert answer.status == 400 and "cache_control: expected {'type': 'ephemeral'}" in answer.json["error"]["message"]


def test_openais_package_names_a_session_and_how_long_it_is_of_use(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0])
    for _ in range(2):
        answer = client.chat.completions.create(
            model="fake", messages=CHAT["messages"], max_tokens=2, prompt_cache_key="pkg", prompt_cache_retention="24h"
        )
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert session(server, "pkg").json["turns"] == 2


def test_anthropics_package_gives_cache_control_with_its_times(server):
    client = anthropic.Anthropic(base_url=server.url, api_key=KEYS[0])
    for ttl in ("5m", "1h"):
        answer = client.messages.create(
            model="fake",
            max_tokens=2,
            system=[{"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral", "ttl": ttl}}],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}
            ],
        )
    assert answer.usage.cache_read_input_tokens > 0
