"""The walk of docs/adding.md that adds a path of the server: in a copy of the product."""

from __future__ import annotations

from tests.scratch_tree import copy_with, run_in

ENDPOINT = """def _words(front: Front) -> Answer:
    async def count(body: bytes) -> Told:
        given = read_object(body)
        return {"model": front.options.served_names[0], "words": len(str(given.pop("text", "")).split())}, list(given)

    return _json(front, count)


ENDPOINTS: tuple"""
LINE = '    ("POST", "/tokenize", _tokenize),\n'
CHANGED = {
    "mllm_compile/server/endpoints.py": [
        ("ENDPOINTS: tuple", ENDPOINT),
        (LINE, LINE + '    ("POST", "/words", _words),\n'),
    ],
}

# It is routed, guarded, bounded, listed and answers mistakes as the others do, by what no step has touched.
SERVES = """
from tests.server.harness import fake_server

with fake_server({"api_keys": ["secret"]}) as server:
    key = {"authorization": "Bearer secret"}
    answer = server.post("/words", {"text": "one two three", "colour": 1}, headers=key)
    assert (answer.status, answer.json) == (200, {"model": "fake", "words": 3}), answer.body
    assert answer.headers["x-mllm-ignored"] == "colour"
    assert server.post("/words", {"text": "one"}).status == 401, "a key is asked for"
    assert server.get("/words", headers=key).status == 405
    assert server.post("/words", b"{", headers=key).status == 400
    assert "/words" in server.get("/openapi.json", headers=key).json["paths"]
"""


def test_the_walk_that_adds_a_path_answers_guards_and_lists_it_in_one_file_and_its_line_in_the_page(tmp_path):
    assert len(CHANGED) == 1, "docs/server.md is the second"
    copy_with(tmp_path, {}, CHANGED)
    run_in(tmp_path, SERVES)
