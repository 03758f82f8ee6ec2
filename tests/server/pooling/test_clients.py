"""The clients of Cohere and LiteLLM, unmodified, where they are installed: `pip install cohere litellm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.fake_pooling import fake_numbers
from tests.server.fake_backend import TOKENIZER
from tests.server.harness import Server, fake_server
from tests.server.pooling.test_paths import _pair_scores

pytestmark = pytest.mark.slow

DOCUMENTS = ["one", "two", "three"]


@pytest.fixture(scope="module")
def embedder() -> Iterator[Server]:
    with fake_server(settings={"pooling": {}}) as server:
        yield server


@pytest.fixture(scope="module")
def reranker() -> Iterator[Server]:
    with fake_server(settings={"pooling": {"task": "classify", "rules": ["cls"], "outputs": 1}}) as server:
        yield server


def check_order(results: list[Any], texts: list[str]) -> None:
    scores = _pair_scores("def", DOCUMENTS)
    order = np.argsort(-scores)[:2].tolist()
    assert texts == [DOCUMENTS[at] for at in order]
    np.testing.assert_allclose(results, scores[order], rtol=1e-5)


def test_coheres_client_reranks(reranker: Server) -> None:
    cohere: Any = pytest.importorskip("cohere")
    for client in (cohere.Client("key", base_url=reranker.url), cohere.ClientV2("key", base_url=reranker.url)):
        found = client.rerank(model="fake", query="def", documents=DOCUMENTS, top_n=2)
        check_order([one.relevance_score for one in found.results], [DOCUMENTS[one.index] for one in found.results])


def test_litellm_embeds(embedder: Server) -> None:
    litellm: Any = pytest.importorskip("litellm")
    said = {"api_base": embedder.url + "/v1", "api_key": "none"}
    found = litellm.embedding(model="openai/fake", input=["def", "return"], **said)
    for one, text in zip(found.data, ["def", "return"], strict=True):
        np.testing.assert_allclose(one["embedding"], fake_numbers(TOKENIZER.encode(text), 4), rtol=1e-6)


@pytest.mark.parametrize("provider", ["hosted_vllm", "cohere", "jina_ai"])
def test_litellm_reranks(provider: str, reranker: Server) -> None:
    litellm: Any = pytest.importorskip("litellm")
    base = reranker.url + ("/v1/rerank" if provider == "cohere" else "/v1" if provider == "jina_ai" else "")
    found = litellm.rerank(
        model=f"{provider}/fake", query="def", documents=DOCUMENTS, top_n=2, api_base=base, api_key="none"
    )
    check_order([one["relevance_score"] for one in found.results], [DOCUMENTS[one["index"]] for one in found.results])
