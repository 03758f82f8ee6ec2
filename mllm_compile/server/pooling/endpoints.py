"""The endpoints of a model that pools. Each reads its fields, asks the engine, and answers in its interface's form."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from mllm_compile.engine.pooling.calls import TaskRules, similar
from mllm_compile.engine.pooling.texts import ReadText, TextReader
from mllm_compile.engine.requests import as_priority
from mllm_compile.errors import MllmError
from mllm_compile.runtime.pooling.texts import PoolingParams
from mllm_compile.server.api.errors import GENERATES, UNSUPPORTED, ApiError, bad_request, of_error, timed_out
from mllm_compile.server.api.fields import members_of, read_fields
from mllm_compile.server.endpoints import Answer, Endpoint, ToldBytes, from_body
from mllm_compile.server.flow.admission import Place
from mllm_compile.server.flow.job import JSON
from mllm_compile.server.flow.memory import Share
from mllm_compile.server.front import Front
from mllm_compile.server.pooling import answers
from mllm_compile.server.pooling.fields import (
    ClassifyFields,
    EmbeddingFields,
    EmbedFields,
    PooledFields,
    PoolingFields,
    PredictFields,
    RerankFields,
    ScoreFields,
    TextsFields,
)
from mllm_compile.server.pooling.front import PoolingFront

T = TypeVar("T")

_MOST_NUMBERS = 1 << 23  # of an answer: as JSON some 180 MB
_FEW_NUMBERS = 1 << 12  # as JSON in less than a millisecond
_BYTES_OF_NUMBER = 20  # as JSON
_HELD_OF_NUMBER = 8 + _BYTES_OF_NUMBER  # as the engine sends it, as an array, and as JSON
_CUT = -1  # as many tokens as the model takes


@dataclass
class Asking:
    """One request on its way: what the model is, and what the client said of all texts.

    Attributes:
        place: in the queue.
        share: of the memory.
        num_numbers: of the answers that came.
    """

    front: Front
    model: PoolingFront
    place: Place
    share: Share
    num_bytes: int
    priority: int = 0
    cut_to: int | None = None
    num_numbers: int = 0

    @property
    def rules(self) -> TaskRules:
        return self.model.rules

    async def read(self, texts: Any, prompt_name: str | None = None) -> list[ReadText]:
        """Texts as token ids."""
        read = self.model.reader.read
        return await self._in_thread(lambda: read(texts, prompt_name=prompt_name, cut_to=self.cut_to))

    async def _in_thread(self, function: Callable[[], list[ReadText]]) -> list[ReadText]:
        return await self.front.in_thread(self.num_bytes, function)

    async def run(self, texts: Sequence[ReadText], params: PoolingParams) -> list[np.ndarray]:
        """The engine's answers."""
        facts = self.rules.facts
        rows = answers.num_tokens(texts) if params.is_of_tokens else len(texts)
        is_of_labels = params.task in ("classify", "token_classify")
        numbers = rows * (facts.outputs if is_of_labels else params.dimensions or max(facts.width, facts.outputs))
        if numbers > _MOST_NUMBERS:
            raise ApiError(413, f"the answer would have {numbers:,} numbers; expected at most {_MOST_NUMBERS:,}")
        self.share.hold(self.share.num_bytes + _HELD_OF_NUMBER * numbers)
        self.place.hold(len(texts))
        await self.front.facts(None)  # it may have begun to sleep, or to start again, while the texts were read
        made = await self.front.pooling.run(texts, params, self.priority)
        self.num_numbers += sum(one.size for one in made)
        return made

    async def work(self, function: Callable[[], T]) -> T:
        """The result of a function over the answers, which runs in a thread where they are large."""
        if self.num_numbers <= _FEW_NUMBERS:
            return function()
        return await self.front.in_thread(_BYTES_OF_NUMBER * self.num_numbers, function)

    async def scores(self, pairs: list[tuple[Any, Any]], activates: bool) -> tuple[list[float], int]:
        """How well the texts of each pair go together, and how many tokens were read."""
        self.rules.check_score()
        if not pairs:
            raise bad_request("there is no text; expected one at least")
        if self.rules.scores_pairs:
            reader: TextReader = self.model.reader
            texts = await self._in_thread(lambda: reader.read_pairs(pairs, self.cut_to))
            made = await self.run(texts, self.rules.classify(activates))
            return [float(one[0]) for one in made], answers.num_tokens(texts)
        firsts, seconds = ([pair[side] for pair in pairs] for side in (0, 1))
        alone = [firsts[0]] if all(one is firsts[0] for one in firsts) else firsts  # a query is read once
        texts = [*await self.read(alone), *await self.read(seconds)]
        params, similarity = self.rules.of_similarity()
        made = await self.run(texts, params)
        left, right = made[: len(alone)], made[len(alone) :]
        sides = zip(left * len(right) if len(left) == 1 else left, right, strict=True)
        scores = await self.work(lambda: [similar(one, other, similarity) for one, other in sides])
        return scores, answers.num_tokens(texts)


def _endpoint(
    kind: type[msgspec.Struct],
    answer: Callable[[Asking, Any], Coroutine[Any, Any, Callable[[], Any]]],
    with_texts: type[msgspec.Struct] | None = None,
) -> Endpoint:
    """An endpoint of these fields; those of `with_texts` where a body has `texts`.

    Args:
        answer: asks the engine, and returns what makes the body of that.
    """

    def of(front: Front) -> Answer:
        async def told(body: bytes, client: str, share: Share) -> ToldBytes:
            has_texts = with_texts is not None and "texts" in members_of(body)
            fields, unknown = read_fields(with_texts if with_texts is not None and has_texts else kind, body)
            front.check_open()
            limit_s = front.options.request_timeout_s
            try:
                async with asyncio.timeout(limit_s):
                    with front.admission.place() as place:
                        make, asking = await asked(fields, place, share, len(body))
                        return await asking.work(lambda: msgspec.json.encode(make())), unknown
            except TimeoutError:
                assert limit_s is not None, "else there is no limit"
                raise timed_out(limit_s) from None
            except MllmError as error:
                raise of_error(error, None) from None

        async def asked(fields: Any, place: Place, share: Share, num_bytes: int) -> tuple[Callable[[], Any], Asking]:
            facts = await front.facts_of_texts(getattr(fields, "model", None))
            if facts.pooling is None:
                raise ApiError(404, GENERATES, code=UNSUPPORTED)
            asking = Asking(front, facts.pooling, place, share, num_bytes, _priority(fields), _cut_to(fields))
            return await answer(asking, fields), asking

        return from_body(front, told, JSON)

    return of


def _priority(fields: Any) -> int:
    given = getattr(fields, "priority", None)
    return 0 if given is None else as_priority(given)


def _cut_to(fields: Any) -> int | None:
    cut: int | None = getattr(fields, "truncate_prompt_tokens", None)
    return _CUT if getattr(fields, "truncate", False) else cut


def _head(asking: Asking, fields: PooledFields, prefix: str) -> dict[str, Any]:
    name = fields.model or asking.front.names.first
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()), "model": name}


async def _embeddings(asking: Asking, fields: EmbeddingFields) -> Callable[[], Any]:
    params = asking.rules.embed(None, fields.normalize, fields.dimensions)
    texts = await asking.read(fields.input, fields.prompt_name)
    made = await asking.run(texts, params)
    return lambda: (
        _head(asking, fields, "embd")
        | {
            "data": [
                {"object": "embedding", "index": at, "embedding": answers.numbers(one, fields.encoding_format)}
                for at, one in enumerate(made)
            ],
            "usage": answers.usage(answers.num_tokens(texts)),
        }
    )


async def _pooling(asking: Asking, fields: PoolingFields) -> Callable[[], Any]:
    params = asking.rules.encode(fields.task, fields.normalize, fields.use_activation is not False)
    texts = await asking.read(fields.input)
    made = await asking.run(texts, params)
    return lambda: (
        _head(asking, fields, "pool")
        | {
            "data": [
                {"object": "pooling", "index": at, "data": answers.numbers(one, fields.encoding_format)}
                for at, one in enumerate(made)
            ],
            "usage": answers.usage(answers.num_tokens(texts)),
        }
    )


async def _classify(asking: Asking, fields: ClassifyFields) -> Callable[[], Any]:
    params = asking.rules.classify(fields.use_activation is not False)
    texts = await asking.read(fields.input)
    made = await asking.run(texts, params)
    labels = asking.rules.facts.labels
    return lambda: (
        _head(asking, fields, "classify")
        | {
            "data": [
                {"index": at, "label": answers.label(labels, one), "probs": one.tolist(), "num_classes": len(one)}
                for at, one in enumerate(made)
            ],
            "usage": answers.usage(answers.num_tokens(texts)),
        }
    )


async def _score(asking: Asking, fields: ScoreFields) -> Callable[[], Any]:
    from mllm_compile.engine.pooling.calls import paired

    pairs: list[tuple[Any, Any]] = paired(fields.text_1, fields.text_2)
    scores, tokens = await asking.scores(pairs, fields.use_activation is not False)
    data = [{"object": "score", "index": at, "score": score} for at, score in enumerate(scores)]
    return lambda: _head(asking, fields, "score") | {"data": data, "usage": answers.usage(tokens)}


async def _rerank(asking: Asking, fields: RerankFields | TextsFields) -> Callable[[], Any]:
    if isinstance(fields, TextsFields):
        scores, _ = await asking.scores([(fields.query, text) for text in fields.texts], not fields.raw_scores)
        texts = fields.texts if fields.return_text else None
        return lambda: answers.ranked(scores, lambda at: {} if texts is None else {"text": texts[at]}, "score")
    documents = [answers.text_of(one, at) for at, one in enumerate(fields.documents)]
    if fields.top_n is not None and fields.top_n < 1:
        raise bad_request(f"top_n: expected 1 or more, got {fields.top_n}", "top_n")
    if fields.max_tokens_per_doc is not None and asking.rules.scores_pairs:
        raise bad_request(
            "max_tokens_per_doc: pairs are cut as a whole. Use truncate_prompt_tokens", "max_tokens_per_doc"
        )
    scores, tokens = await asking.scores([(fields.query, document) for document in documents], True)
    is_shown = fields.return_documents is not False
    results = answers.ranked(
        scores, lambda at: {"document": {"text": documents[at]}} if is_shown else {}, "relevance_score"
    )
    head = _head(asking, fields, "rerank")
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return lambda: {
        "id": head["id"],
        "model": head["model"],
        "usage": answers.usage(tokens),
        "results": results[: fields.top_n],
        "meta": meta,
    }


async def _embed(asking: Asking, fields: EmbedFields) -> Callable[[], Any]:
    params = asking.rules.embed(None, fields.normalize is not False, fields.dimensions)
    made = await asking.run(await asking.read(fields.inputs, fields.prompt_name), params)
    return lambda: [answers.numbers(one, None) for one in made]


async def _embed_all(asking: Asking, fields: EmbedFields) -> Callable[[], Any]:
    params = asking.rules.encode("token_embed", False)
    made = await asking.run(await asking.read(fields.inputs, fields.prompt_name), params)
    return lambda: [answers.numbers(one, None) for one in made]


async def _predict(asking: Asking, fields: PredictFields) -> Callable[[], Any]:
    params = asking.rules.classify(not fields.raw_scores)
    texts, pairs = answers.predicted_texts(fields.inputs)
    if pairs:
        reader, cut_to = asking.model.reader, asking.cut_to
        read = await asking.front.in_thread(asking.num_bytes, lambda: reader.read_pairs(pairs, cut_to))
    else:
        read = await asking.read(texts)
    labels = asking.rules.facts.labels
    scores = await asking.run(read, params)

    def make() -> Any:
        made = [answers.predicted(labels, one) for one in scores]
        return made if answers.are_several(fields.inputs) else made[0]

    return make


_RERANK = _endpoint(RerankFields, _rerank)
_EITHER_RERANK = _endpoint(RerankFields, _rerank, TextsFields)
ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/embeddings", _endpoint(EmbeddingFields, _embeddings)),
    ("POST", "/pooling", _endpoint(PoolingFields, _pooling)),
    ("POST", "/classify", _endpoint(ClassifyFields, _classify)),
    ("POST", "/score", _endpoint(ScoreFields, _score)),
    ("POST", "/v1/score", _endpoint(ScoreFields, _score)),
    ("POST", "/rerank", _EITHER_RERANK),
    ("POST", "/v1/rerank", _RERANK),
    ("POST", "/v2/rerank", _RERANK),
    ("POST", "/embed", _endpoint(EmbedFields, _embed)),
    ("POST", "/embed_all", _endpoint(EmbedFields, _embed_all)),
    ("POST", "/predict", _endpoint(PredictFields, _predict)),
)
BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/embeddings": EmbeddingFields,
    "/pooling": PoolingFields,
    "/classify": ClassifyFields,
    **dict.fromkeys(("/score", "/v1/score"), ScoreFields),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankFields),
    **dict.fromkeys(("/embed", "/embed_all"), EmbedFields),
    "/predict": PredictFields,
}
