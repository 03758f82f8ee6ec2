"""The fields of requests for embeddings, scores and labels, by OpenAI's, vLLM's, Cohere's, Jina's and TEI's names."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Texts = str | list[Any]  # a text, texts, token ids, or lists of ids


class PooledFields(msgspec.Struct, kw_only=True):
    """The fields that each of them may have."""

    model: str | None = None
    user: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None


class EmbeddingFields(PooledFields, kw_only=True):
    """The fields of /v1/embeddings."""

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class PoolingFields(PooledFields, kw_only=True):
    """The fields of /pooling."""

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    task: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


class ClassifyFields(PooledFields, kw_only=True):
    """The fields of /classify."""

    input: Texts
    use_activation: bool | None = None


class ScoreFields(PooledFields, kw_only=True):
    """The fields of /score."""

    text_1: Texts
    text_2: Texts
    use_activation: bool | None = None


class RerankFields(PooledFields, kw_only=True):
    """The fields of /v1/rerank and /v2/rerank."""

    query: str
    documents: list[Any]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None


class TextsFields(msgspec.Struct, kw_only=True):
    """The fields of TEI's /rerank; `documents` in place of `texts` make it the other one."""

    query: str
    texts: list[str]
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None


class EmbedFields(msgspec.Struct, kw_only=True):
    """The fields of TEI's /embed and /embed_all."""

    inputs: Texts
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None
    prompt_name: str | None = None
    dimensions: int | None = None


class PredictFields(msgspec.Struct, kw_only=True):
    """The fields of TEI's /predict: a text, a pair, or a list of lists of one text or two."""

    inputs: Texts
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None
