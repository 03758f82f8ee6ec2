"""The answers to texts, under the names that vLLM's users know. Numbers are numpy arrays of float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """An `embedding` [D]."""

    embedding: np.ndarray

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True, eq=False)
class ClassificationOutput:
    """`probs` [labels], or scores where no activation was asked for."""

    probs: np.ndarray

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The `score` of a pair."""

    score: float


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """`data`: [D], [labels], or [n, …] for the n tokens of a text."""

    data: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRequestOutput(Generic[T]):
    """The answer to one text, or pair.

    Attributes:
        request_id: a number of this engine's.
        outputs: the answer.
        ids: [n] int64, the tokens that were read.
        finished: always true.
    """

    request_id: str
    outputs: T
    ids: np.ndarray
    finished: bool = True

    @property
    def prompt_token_ids(self) -> list[int]:
        """The tokens that were read; a list is made of each call."""
        return list(self.ids.tolist())


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """An answer of `embed`."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """An answer of `classify`."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """An answer of `score`."""
