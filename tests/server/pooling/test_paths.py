"""Embeddings, scores and labels over HTTP, by the interfaces of OpenAI, vLLM, Cohere, Jina and TEI."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from tests.fake_pooling import MOST_TEXTS, MOST_TOKENS, WIDTH, fake_numbers
from tests.hang_guard import until
from tests.server.fake_backend import TOKENIZER
from tests.server.harness import Server, fake_server

LABELS = ("bad", "good", "great")


@pytest.fixture(scope="module")
def embedder() -> Iterator[Server]:
    with fake_server(settings={"pooling": {"dimensions": [2]}}) as server:
        yield server


@pytest.fixture(scope="module")
def classifier() -> Iterator[Server]:
    settings = {"task": "classify", "rules": ["cls"], "outputs": 3, "labels": LABELS}
    with fake_server(settings={"pooling": settings}) as server:
        yield server


@pytest.fixture(scope="module")
def reranker() -> Iterator[Server]:
    with fake_server(settings={"pooling": {"task": "classify", "rules": ["cls"], "outputs": 1}}) as server:
        yield server


def _embedding(text: str, count: int = WIDTH) -> np.ndarray:
    return fake_numbers(TOKENIZER.encode(text), count)


def test_openais_client_gets_embeddings(embedder: Server) -> None:
    with openai.OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="fake", input=["def", "return"])
        cut = client.embeddings.create(model="fake", input="def", dimensions=2, encoding_format="float")
        ids = client.embeddings.create(model="fake", input=[TOKENIZER.encode("def")])
    for one, text in zip(found.data, ["def", "return"], strict=True):
        np.testing.assert_allclose(one.embedding, _embedding(text), rtol=1e-6)
    assert [one.index for one in found.data] == [0, 1] and found.model == "fake"
    assert found.usage.total_tokens == len(TOKENIZER.encode("def")) + len(TOKENIZER.encode("return"))
    np.testing.assert_allclose(cut.data[0].embedding, _embedding("def", 2), rtol=1e-6)
    np.testing.assert_allclose(ids.data[0].embedding, _embedding("def"), rtol=1e-6)


def test_an_embedding_in_base64_is_little_endian_float32(embedder: Server) -> None:
    answer = embedder.post("/v1/embeddings", {"input": "def", "encoding_format": "base64"})
    data = base64.b64decode(answer.json["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(data, "<f4"), _embedding("def"))


def test_tokens_have_embeddings_of_their_own(embedder: Server) -> None:
    ids = TOKENIZER.encode("def f")
    expected = np.stack([fake_numbers([token], WIDTH) for token in ids])
    pooled = embedder.post("/pooling", {"input": "def f", "task": "token_embed"}).json["data"][0]["data"]
    np.testing.assert_allclose(pooled, expected, rtol=1e-6)
    np.testing.assert_allclose(embedder.post("/embed_all", {"inputs": "def f"}).json[0], expected, rtol=1e-6)


def test_teis_embed_gives_bare_lists(embedder: Server) -> None:
    found = embedder.post("/embed", {"inputs": ["def", "return"], "truncate": True}).json
    np.testing.assert_allclose(found, [_embedding("def"), _embedding("return")], rtol=1e-6)


def test_a_score_of_an_embedder_is_the_cosine(embedder: Server) -> None:
    one, other = _embedding("def"), _embedding("return")
    found = embedder.post("/score", {"text_1": "def", "text_2": ["return", "def"]}).json["data"]
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    np.testing.assert_allclose([entry["score"] for entry in found], [cosine, 1], rtol=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(reranker: Server, path: str) -> None:
    documents: list[Any] = ["one", {"text": "two"}, "three"]
    found = reranker.post(path, {"query": "def", "documents": documents, "top_n": 2}).json["results"]
    scores = _pair_scores("def", ["one", "two", "three"])
    order = np.argsort(-scores)[:2].tolist()
    assert [entry["index"] for entry in found] == order
    np.testing.assert_allclose([entry["relevance_score"] for entry in found], scores[order], rtol=1e-5)
    assert [entry["document"]["text"] for entry in found] == [["one", "two", "three"][at] for at in order]


def test_teis_rerank_has_texts(reranker: Server) -> None:
    found = reranker.post("/rerank", {"query": "def", "texts": ["one", "two"], "return_text": True}).json
    assert {entry["text"] for entry in found} == {"one", "two"}
    assert found[0]["score"] >= found[1]["score"] and set(found[0]) == {"index", "score", "text"}


def _pair_scores(query: str, documents: list[str]) -> np.ndarray:
    pairs = TOKENIZER.encode_texts([(query, one) for one in documents])
    raw = np.array([fake_numbers(ids, 1)[0] for ids, _ in pairs])
    return 1 / (1 + np.exp(-raw))


def test_labels_have_probabilities(classifier: Server) -> None:
    probs = 1 / (1 + np.exp(-fake_numbers(TOKENIZER.encode("def"), 3)))
    (found,) = classifier.post("/classify", {"input": "def"}).json["data"]
    np.testing.assert_allclose(found["probs"], probs, rtol=1e-6)
    assert found["label"] == LABELS[int(probs.argmax())] and found["num_classes"] == 3
    flat = classifier.post("/predict", {"inputs": "def"}).json
    assert [one["label"] for one in flat] == [LABELS[at] for at in np.argsort(-probs)]
    several = classifier.post("/predict", {"inputs": [["def"], ["return"]]}).json
    assert several[0] == flat and len(several) == 2


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": []}, "there is no text"),
        ("/v1/embeddings", {"input": [[]]}, "expected a text or token ids"),
        ("/v1/embeddings", {}, "input: it is missing"),
        ("/v1/embeddings", {"input": 5}, "input: expected"),
        ("/v1/embeddings", {"input": ["def", 5]}, "a prompt is int 5"),
        ("/v1/embeddings", {"input": [[-1]]}, "token id -1"),
        ("/v1/embeddings", {"input": [[5, 10**19]]}, "text 0 has token id 10000000000000000000; expected 0 to"),
        ("/v1/embeddings", {"input": "def", "dimensions": 3}, "expected one of 2"),
        ("/v1/embeddings", {"input": "def", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "def", "prompt_name": "query"}, "the model has no prompt 'query'"),
        ("/v1/embeddings", {"input": [[5] * (MOST_TOKENS + 1)]}, f"the model takes {MOST_TOKENS}"),
        ("/classify", {"input": "def"}, "no head for 'classify'; it has: embed, token_embed, score"),
        ("/predict", {"inputs": "def"}, "no head for 'classify'"),
        ("/pooling", {"input": "def", "task": "plugin"}, "no head for 'plugin'"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "2 and 3 texts"),
        ("/rerank", {"query": "def", "documents": []}, "there is no text"),
        ("/rerank", {"query": "def", "documents": [5]}, "documents: number 0 is int 5"),
        ("/rerank", {"query": "def", "documents": ["a"], "top_n": 0}, "top_n: expected 1 or more"),
    ],
)
def test_bad_input_is_a_400_and_hurts_no_other(embedder: Server, path: str, body: Any, message: str) -> None:
    answer = embedder.post(path, body)
    assert answer.status == 400 and message in answer.error["message"], answer.body
    assert embedder.post("/v1/embeddings", {"input": "def"}).status == 200


def test_a_long_text_is_cut_where_that_is_asked_for(embedder: Server) -> None:
    answer = embedder.post("/v1/embeddings", {"input": [[5] * 99], "truncate_prompt_tokens": -1})
    assert answer.json["usage"]["prompt_tokens"] == MOST_TOKENS


def test_an_answer_of_too_many_numbers_is_refused(embedder: Server) -> None:
    texts = [[5] * MOST_TOKENS] * ((1 << 23) // MOST_TOKENS // WIDTH + 1)
    assert embedder.post("/pooling", {"input": texts}).status == 413


def test_a_model_that_pools_generates_nothing(embedder: Server) -> None:
    answer = embedder.post("/v1/completions", {"prompt": "def"})
    assert (answer.status, answer.error["code"]) == (404, "unsupported_endpoint")
    assert "it has: embed, token_embed, score" in answer.error["message"]


def test_many_clients_are_answered_at_once(embedder: Server) -> None:
    texts = [f"text {number}" for number in range(64)]
    with ThreadPoolExecutor(16) as clients:
        found = list(clients.map(lambda text: embedder.post("/v1/embeddings", {"input": text}).json, texts))
    for text, one in zip(texts, found, strict=True):
        np.testing.assert_allclose(one["data"][0]["embedding"], _embedding(text), rtol=1e-6)


def test_a_model_that_generates_answers_with_what_to_do() -> None:
    with fake_server() as server:
        for path in ("/v1/embeddings", "/pooling", "/embed"):
            answer = server.post(path, {"input": "def", "inputs": "def"})
            assert (answer.status, answer.error["code"]) == (404, "unsupported_endpoint"), path


def test_the_queue_is_bounded_in_texts() -> None:
    with fake_server({"max_queue": 2}, {"pooling": {}}) as server, ThreadPoolExecutor(1) as clients:
        (pid,) = server.engine_pids()
        os.kill(pid, signal.SIGSTOP)
        try:
            first = clients.submit(server.post, "/v1/embeddings", {"input": ["def"] * (MOST_TEXTS + 1)})
            # One waits before its texts are counted too, so the load says as well that the engine has it.
            until(lambda: server.get("/load").json == {"server_load": 1, "running": 1, "waiting": 1})
            refused = server.post("/v1/embeddings", {"input": ["def", "return"]})
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (refused.status, refused.error["code"]) == (429, "queue_full"), refused.body
        assert int(refused.headers["retry-after"]) >= 1
        assert f"{MOST_TEXTS + 1} prompts wait, of at most {MOST_TEXTS + 2}" in refused.error["message"]
        assert len(first.result().json["data"]) == MOST_TEXTS + 1
        assert server.post("/v1/embeddings", {"input": ["def", "return"]}).status == 200
        assert server.get("/load").json["waiting"] == 0


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_ended() -> None:
    with fake_server({"request_timeout_s": 0.5}, {"pooling": {}}) as server:
        (pid,) = server.engine_pids()
        os.kill(pid, signal.SIGSTOP)
        answer = server.post("/v1/embeddings", {"input": "def"})
        os.kill(pid, signal.SIGCONT)
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
