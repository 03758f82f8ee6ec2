"""The calls of an engine that pools: what is asked for is checked, read, run, and answered in vLLM's form."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import numpy as np

from mllm_compile.engine.pooling.core import Answers, PoolingCore
from mllm_compile.engine.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from mllm_compile.engine.pooling.texts import ReadText, TextPrompt, TextPrompts, TextReader, listed_prompts
from mllm_compile.engine.requests import as_priority
from mllm_compile.errors import RequestError
from mllm_compile.runtime.pooling.facts import PoolingFacts, PoolingRule, PoolingTask
from mllm_compile.runtime.pooling.texts import PackedText, PoolingParams
from mllm_compile.runtime.short_repr import short_repr

_RULES: dict[str, PoolingRule] = {"cls": "cls", "last": "last", "mean": "mean", "max": "max"}


class TaskRules:
    """Says what may be asked of a model; free of the device."""

    def __init__(self, facts: PoolingFacts, has_dense: bool) -> None:
        self.facts, self.has_dense = facts, has_dense

    def embed(self, pooling: str | None, normalize: bool | None, dimensions: int | None) -> PoolingParams:
        """
        Raises:
            RequestError: the model does not embed, or not so.
        """
        self.check("embed")
        rules = self.facts.rules
        if pooling is not None:
            rules = (self._rule(pooling),)
        self._check_dimensions(dimensions)
        chosen = self.facts.normalize if normalize is None else normalize
        return PoolingParams("embed", rules, bool(chosen), dimensions)

    def classify(self, use_activation: bool = True) -> PoolingParams:
        self.check("classify")
        return PoolingParams("classify", self.facts.rules, activates=bool(use_activation))

    def reward(self) -> PoolingParams:
        """The raw score of a text, of a model with one label."""
        self.check("classify")
        if self.facts.outputs != 1:
            raise RequestError(
                f"the model classifies by {self.facts.outputs} labels, and gives no reward, which is one number. "
                "Use classify."
            )
        return PoolingParams("classify", self.facts.rules, activates=False)

    def encode(
        self, pooling_task: str | None, normalize: bool | None = None, use_activation: bool = True
    ) -> PoolingParams:
        """The parameters of `encode`; without a task the model's own."""
        task = self.facts.tasks[-1] if pooling_task is None else pooling_task
        if task not in self.facts.tasks:
            raise self._has_no(str(task))
        of_task: PoolingTask = task
        chosen = self.facts.normalize if normalize is None else normalize
        normalizes = bool(chosen) and "embed" in of_task
        return PoolingParams(of_task, self.facts.rules, normalizes, activates=bool(use_activation))

    @property
    def scores_pairs(self) -> bool:
        """True if the model reads both texts of a pair together."""
        return self.facts.task == "classify" and self.facts.outputs == 1

    def of_similarity(self) -> tuple[PoolingParams, str]:
        """The parameters of texts whose embeddings are compared, and how they are (`similar`)."""
        if self.facts.task == "token_embed":
            return self.encode("token_embed", True), "maxsim"
        return self.embed(None, None, None), self.facts.similarity

    def check_score(self) -> None:
        if not self.scores_pairs and self.facts.task not in ("embed", "token_embed"):
            raise self._has_no("score")

    def check(self, task: PoolingTask) -> None:
        """
        Raises:
            RequestError: the model has no head for it; with those that it has.
        """
        if task not in self.facts.tasks:
            raise self._has_no(task)

    @property
    def names(self) -> list[str]:
        """All that the model has, for people."""
        has: list[str] = list(self.facts.tasks)
        scores = self.scores_pairs or self.facts.task in ("embed", "token_embed")
        return [*has, "score"] if scores else has

    def _has_no(self, task: str) -> RequestError:
        return RequestError(f"the model has no head for {short_repr(task)}; it has: {', '.join(self.names)}")

    def _rule(self, pooling: str) -> PoolingRule:
        rule = _RULES.get(str(pooling).lower())
        if rule is None:
            raise RequestError(f"pooling is {short_repr(pooling)}; expected {', '.join(_RULES)}")
        if self.has_dense and (rule,) != self.facts.rules:
            raise RequestError(
                f"pooling is {rule}, and the model's dense layers were made for {', '.join(self.facts.rules)}. "
                "Leave it out."
            )
        return rule

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None:
            return
        known, most = self.facts.dimensions, self.facts.outputs
        if type(dimensions) is not int or not 1 <= dimensions <= most:
            raise RequestError(f"dimensions is {short_repr(dimensions)}; expected 1 to {most}")
        if not known:
            raise RequestError(
                f"dimensions is {dimensions}, and the model's config.json names neither is_matryoshka nor "
                "matryoshka_dimensions: a part of its embeddings says little. Leave it out."
            )
        if known != (0,) and dimensions not in known:
            raise RequestError(f"dimensions is {dimensions}; expected one of {', '.join(map(str, known))}")


class PoolingCalls:
    """The calls of one engine; any thread may make them."""

    def __init__(self, core: PoolingCore, reader: TextReader, rules: TaskRules) -> None:
        self.core, self.reader, self.rules = core, reader, rules
        self._number = itertools.count()

    def embed(
        self,
        prompts: TextPrompts,
        pooling: str | None,
        normalize: bool | None,
        dimensions: int | None,
        prompt_name: str | None,
        cut_to: int | None,
        priority: int,
    ) -> list[EmbeddingRequestOutput]:
        asked = self.rules.embed(pooling, normalize, dimensions)
        return [
            EmbeddingRequestOutput(self._id(), EmbeddingOutput(answer), text.ids)
            for text, answer in self._answered(prompts, asked, cut_to, priority, prompt_name)
        ]

    def classify(
        self, prompts: TextPrompts, use_activation: bool, cut_to: int | None, priority: int
    ) -> list[ClassificationRequestOutput]:
        asked = self.rules.classify(use_activation)
        return [
            ClassificationRequestOutput(self._id(), ClassificationOutput(answer), text.ids)
            for text, answer in self._answered(prompts, asked, cut_to, priority)
        ]

    def pooled(
        self, prompts: TextPrompts, asked: PoolingParams, cut_to: int | None, priority: int
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        return [
            PoolingRequestOutput(self._id(), PoolingOutput(answer), text.ids)
            for text, answer in self._answered(prompts, asked, cut_to, priority)
        ]

    def score(
        self, one: TextPrompts, other: TextPrompts, use_activation: bool, cut_to: int | None, priority: int
    ) -> list[ScoringRequestOutput]:
        self.rules.check_score()
        pairs = paired(one, other)
        texts, scores = self._scores(pairs, use_activation, cut_to, priority)
        return [
            ScoringRequestOutput(self._id(), ScoringOutput(score), ids)
            for ids, score in zip(texts, scores, strict=True)
        ]

    def _scores(
        self, pairs: Sequence[tuple[Any, Any]], use_activation: bool, cut_to: int | None, priority: int
    ) -> tuple[list[np.ndarray], list[float]]:
        if self.rules.scores_pairs:
            texts = self.reader.read_pairs(pairs, cut_to)
            answers = self._wait(self.submit(texts, self.rules.classify(use_activation), priority))
            return [text.ids for text in texts], [float(answer[0]) for answer in answers]
        asked, similarity = self.rules.of_similarity()
        sides = [self.reader.read([pair[side] for pair in pairs], cut_to=cut_to) for side in (0, 1)]
        answers = self._wait(self.submit([*sides[0], *sides[1]], asked, priority))
        halves = zip(answers[: len(pairs)], answers[len(pairs) :], strict=True)
        ids = [np.concatenate([left.ids, right.ids]) for left, right in zip(*sides, strict=True)]
        return ids, [similar(left, right, similarity) for left, right in halves]

    def _answered(
        self,
        prompts: TextPrompts,
        asked: PoolingParams,
        cut_to: int | None,
        priority: int,
        prompt_name: str | None = None,
    ) -> Iterator[tuple[ReadText, np.ndarray]]:
        """The texts and their answers, in their order. Texts of a step are read while the one ahead is computed."""
        parts: list[tuple[list[ReadText], Future[Answers]]] = []
        try:
            reads = self.reader.parts(prompts, self.core.most_tokens, prompt_name=prompt_name, cut_to=cut_to)
            with self.core.reading() if len(reads) > 1 else nullcontext():
                for read in reads:
                    if parts:
                        self.core.give_way(parts[-1][1])
                    texts = read()
                    parts.append((texts, self.submit(texts, asked, priority)))
            for texts, future in parts:
                yield from zip(texts, future.result(), strict=True)
        except BaseException:
            for _, future in parts:
                future.cancel()
            raise

    def submit(self, texts: Sequence[ReadText], asked: PoolingParams, priority: int) -> Future[Answers]:
        """Hands texts to the engine's thread."""
        packed = [PackedText(text.ids, asked, text.kinds, text.skipped) for text in texts]
        return self.core.submit(packed, as_priority(priority))

    def _wait(self, future: Future[Answers]) -> Answers:
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _id(self) -> str:
        return str(next(self._number))


def paired(one: TextPrompts, other: TextPrompts) -> list[tuple[TextPrompt, TextPrompt]]:
    """Pairs of texts: one with each other, or as many with as many.

    Raises:
        RequestError: their numbers do not fit, or there is none.
    """
    first, second = listed_prompts(one), listed_prompts(other)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise RequestError(
            f"there are {len(first)} and {len(second)} texts; expected one and any number, or as many of both"
        )
    return list(zip(first, second, strict=True))


def similar(one: np.ndarray, other: np.ndarray, similarity: str) -> float:
    """How alike two embeddings [D] are, more is more; of `maxsim` two lists of them [n, D]."""
    if similarity == "maxsim":
        return float((one @ other.T).max(1).sum())
    if similarity == "dot":
        return float(one @ other)
    if similarity == "euclidean":
        return -float(np.linalg.norm(one - other))
    if similarity == "manhattan":
        return -float(np.abs(one - other).sum())
    return float(one @ other / max(float(np.linalg.norm(one) * np.linalg.norm(other)), 1e-12))
