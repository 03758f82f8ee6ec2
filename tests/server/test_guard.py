"""Keys and origins, and what is behind each path."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import prometheus_client.parser
import pytest

from mllm_compile.server.app import OPEN_PATHS, paths_of
from mllm_compile.server.options import ServeOptions
from tests.server.harness import ROOT, Server, fake_server

KEY = "secret-1"
OPTIONS = ServeOptions(model="m")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server({"api_keys": [KEY, "secret-2"], "allowed_origins": ["https://a.example"]}) as server:
        yield server


def test_every_path_but_health_and_ready_needs_the_key(server):
    paths = paths_of(OPTIONS)
    assert len(paths) > 15
    for method, path in paths:
        path = path.replace("{name:path}", "fake")
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {KEY}x"}, {"x-api-key": ""}):
            answer = server.ask(method, path, {} if method == "POST" else None, headers)
            if path in OPEN_PATHS:
                assert answer.status == 200, path
            else:
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), path
    assert server.get("/no/such/path").status == 401
    assert server.get("//health").status == 401


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": "secret-2"}])
def test_a_key_opens_every_path(server, headers):
    for method, path in paths_of(OPTIONS):
        answer = server.ask(method, path.replace("{name:path}", "fake"), {} if method == "POST" else None, headers)
        assert answer.status in (200, 400) or answer.error["code"] in ("unsupported_endpoint", "session_not_found"), (
            path
        )


def test_a_browser_may_ask_from_the_origins_that_are_allowed(server):
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    ours = server.ask("OPTIONS", "/v1/completions", headers={"origin": "https://a.example", **asks})
    assert ours.headers["access-control-allow-origin"] == "https://a.example"
    other = server.ask("OPTIONS", "/v1/completions", headers={"origin": "https://b.example", **asks})
    assert "access-control-allow-origin" not in other.headers


def test_a_missing_path_is_reported_in_openais_shape(server):
    key = {"authorization": f"Bearer {KEY}"}
    missing = server.get("/v1/nothing", headers=key)
    assert (missing.status, missing.error["message"]) == (404, "there is no /v1/nothing")
    mistyped = server.post("/v1/chat/completion", {}, headers=key)
    assert mistyped.error["message"] == "there is no /v1/chat/completion; did you mean /v1/chat/completions?"
    method = server.get("/v1/completions", headers=key)
    assert (method.status, method.error["type"]) == (405, "invalid_request_error")
    assert (method.error["message"], method.headers["allow"]) == ("/v1/completions: expected POST", "POST")
    assert server.get("/v1/models/none", headers=key).error["code"] == "model_not_found"


@pytest.mark.parametrize(
    "path",
    [
        "/moderations", "/v1/moderations", "/embeddings", "/encode",
        "/v1/audio/speech", "/generate", "/wake_up", "/flush_cache", "/v1/files",
        "/api/chat", "/get_server_info", "/v1/moderations/",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_path_of_other_servers_is_answered_with_what_to_do(server, method, path):
    answer = server.ask(method, path, headers={"authorization": f"Bearer {KEY}"})
    assert (answer.status, answer.error["code"]) == (404, "unsupported_endpoint")
    assert "did you mean" not in answer.error["message"] and len(answer.error["message"]) > len(path) + 20


def test_a_hint_leads_to_a_path_that_is_there(server):
    key = {"authorization": f"Bearer {KEY}"}
    known = {path for _, path in paths_of(OPTIONS) if "{" not in path}
    missed = {path + "s" for path in known} | {path[:-1] for path in known} | {f"/v1{path}" for path in known}
    missed |= (
        {path.removeprefix("/v1") for path in known} | {path + "/" for path in known} | {"/v1/rerankk", "/v1/scor"}
    )
    hints = 0
    for path in sorted(missed - known - {"", "/"}):
        for method in ("GET", "POST"):
            answer = server.ask(method, path, headers=key)
            assert answer.status in (404, 405), path
            found = re.search(r"did you mean (?:(GET|POST) )?(/\S*)\?", answer.error["message"])
            if found is not None:
                hints += 1
                led = server.ask(found[1] or method, found[2], headers=key)
                assert led.status not in (404, 405), (path, found[0])
    assert hints > 20


def test_a_browser_gets_the_page_with_the_key_as_password(server):
    asked = server.get("/")
    assert asked.status == 401
    assert asked.headers["www-authenticate"].startswith("Basic ")
    for login, status in ((f"me:{KEY}", 200), (f"{KEY}:", 401), ("me:wrong", 401), ("nothing", 401)):
        answer = server.get("/", headers={"authorization": "Basic " + base64.b64encode(login.encode()).decode()})
        assert answer.status == status, login
    page = server.get("/", headers={"authorization": f"Bearer {KEY}"})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in re.findall(r'fetch\("([^"]+)"', page.body.decode()):
        assert path in {path for _, path in paths_of(OPTIONS)}


def test_a_page_of_another_site_may_not_ask(server):
    key = {"authorization": f"Bearer {KEY}"}
    body = {"prompt": "x", "max_tokens": 1}
    for origin, status in (
        (server.url, 200), ("https://a.example", 200), ("https://b.example", 403), ("null", 403), ("x" * 99, 403),
    ):  # fmt: skip
        assert server.post("/v1/completions", body, headers={**key, "origin": origin}).status == status, origin


@pytest.mark.parametrize("path", ["/completions", "/v1/completions/", "/completions/"])
def test_a_path_that_is_nearly_right_is_told_the_right_one_and_leads_nowhere_else(server, path):
    answer = server.post(path, {}, headers={"authorization": f"Bearer {KEY}"})
    assert (answer.status, answer.error["message"]) == (404, f"there is no {path}; did you mean /v1/completions?")
    assert "location" not in answer.headers


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//", "file://", ""])
def test_a_malformed_origin_is_refused(server, origin):
    headers = {"authorization": f"Bearer {KEY}", "origin": origin}
    assert server.get("/v1/models", headers=headers).error["code"] == "origin"


def test_a_site_whose_name_leads_here_may_not_ask_where_no_key_is_needed(server):
    named = {"host": "b.example:8000", "origin": "http://b.example:8000"}
    with fake_server({"allowed_origins": ["https://c.example"]}) as open_server:
        for place, status in (("b.example:8000", 403), ("localhost:80", 200), ("[::1]:80", 200), ("127.1.evil", 403)):
            headers = {"host": place, "origin": f"http://{place}"}
            answer = open_server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=headers)
            assert answer.status == status, place
            for path in ("/metrics", "/v1/models", "/"):  # a page's own GETs have no Origin
                assert open_server.get(path, headers={"host": place}).status == status, (place, path)
        assert open_server.get("/health", headers={"host": "b.example"}).status == 200
        for headers, status in (({"host": "c.example"}, 200), ({"host": "b.example"}, 403),
                                ({"host": "b.example", "origin": "https://c.example"}, 200)):  # fmt: skip
            assert open_server.get("/v1/models", headers=headers).status == status, headers
    with_key = {"authorization": f"Bearer {KEY}", **named}
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=with_key).status == 200


def test_an_id_of_the_header_cannot_imitate_the_rest_of_a_log_line(server):
    for own in ("a 200 in 1 out 2", "x" * 129, "caf\xe9"):
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": own}
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=headers)
        assert re.fullmatch("cmpl-[0-9a-f]{24}", answer.headers["x-request-id"])
    assert "cmpl-a 200" not in server.said


def test_an_empty_bearer_is_no_key_where_none_is_needed():
    with fake_server() as server:
        assert server.complete(headers={"authorization": "Bearer "}).status == 200


def test_figures_are_prometheus_and_equal_what_answers_have_said(server):
    key = {"authorization": f"Bearer {KEY}"}

    def figures() -> dict[str, float]:
        families = prometheus_client.parser.text_string_to_metric_families(
            server.get("/metrics", headers=key).body.decode()
        )
        return {sample.name: sample.value for family in families for sample in family.samples}

    before = figures()
    body = {"prompt": ["def", "class"], "max_tokens": 5, "n": 2}
    usage = server.post("/v1/completions", body, headers=key).json["usage"]
    after = figures()
    for name, count in (("generat", usage["completion_tokens"]), ("prompt", usage["prompt_tokens"])):
        ours, theirs = (f"mllm:{name}ed_tokens_total", f"vllm:{name}ion_tokens_total")
        if name == "prompt":
            ours, theirs = "mllm:prompt_tokens_total", "vllm:prompt_tokens_total"
        assert after[ours] - before[ours] == count
        assert after[theirs] - before[theirs] == count
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "num_preemptions_total", "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count", "request_success_total",
    ):  # fmt: skip
        assert f"vllm:{name}" in after, name


def test_the_front_imports_neither_torch_nor_transformers():
    code = """
import sys
from mllm_compile.cli import make_app
from mllm_compile.server import app, serve
print([name for name in ("torch", "transformers", "triton", "flashinfer") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_log_has_no_prompts(server):
    key = {"authorization": f"Bearer {KEY}"}
    server.post("/v1/completions", {"prompt": "a very secret text", "max_tokens": 2}, headers=key)
    server.post("/v1/completions", {"prompt": "a very secret text", "max_tokens": -2}, headers=key)
    assert "200 in " in server.said
    server.post("/v1/chat/completions", [], headers=key)
    assert "- 400 /v1/completions max_tokens client" in server.said
    assert "- 400 /v1/chat/completions client" in server.said
    server.post("/tokenize", {"prompt": 7}, headers=key)
    assert "- 400 /tokenize prompt client" in server.said
    assert "secret" not in server.said


def test_requests_without_an_endpoint_have_a_line_too(server):
    key = {"authorization": f"Bearer {KEY}", "user-agent": "curl/8"}
    server.get("/v1/models", headers={"user-agent": "scanner"})
    server.get("/v1/models", headers=key | {"origin": "http://elsewhere"})
    server.get("/v1/modles%0A200%20in%205", headers=key)
    server.get("/v1/completions", headers=key)
    server.post("/v1/moderations", {}, headers=key)
    for line in (
        "- 401 /v1/models invalid_api_key client scanner",
        "- 403 /v1/models origin client curl/8",
        r"- 404 '/v1/modles\n200 in 5' client curl/8",
        "- 405 /v1/completions client curl/8",
        "- 404 /v1/moderations unsupported_endpoint client curl/8",
    ):
        assert line in server.said, line


def test_a_log_of_json_has_an_object_a_line_and_a_requests_figures_as_fields():
    with fake_server({"log": "json"}) as server:
        told = server.complete(prompt="a secret", max_tokens=5, ignore_eos=True)
        server.complete(prompt=[], max_tokens=5)
        server.end()
        said = server.said
    lines = [json.loads(line) for line in said.splitlines()]
    assert all(line["level"] == "INFO" and line["time"].endswith("+00:00") for line in lines)
    assert any(line["message"].startswith("ready http://127.0.0.1:") for line in lines)
    over, refused = (line for line in lines if "status" in line)
    assert (over["request"], over["status"], over["out"], over["error"]) == (told.json["id"], 200, 5, None)
    assert {"in", "queue", "prefill", "decode", "steps", "cached", "preempted", "all"} <= over.keys()
    assert (refused["status"], refused["path"], refused["param"]) == (400, "/v1/completions", "prompt")
    assert refused["request"] is None
    assert "secret" not in said
