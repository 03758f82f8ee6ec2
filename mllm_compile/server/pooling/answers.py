"""Parts of answers with embeddings, scores and labels."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from mllm_compile.engine.pooling.texts import ReadText
from mllm_compile.runtime.short_repr import typed_repr
from mllm_compile.server.api.errors import bad_request

_PIECE = 3 << 18  # bytes, which become base64 by themselves


def numbers(array: np.ndarray, encoding: str | None) -> msgspec.Raw:
    """Numbers as JSON: lists, or base64 of little-endian float32, as OpenAI's client asks for them.

    It is made in pieces, between which other threads run: an encoder in C lets none.
    """
    if encoding == "base64":
        data = array.astype("<f4").tobytes()
        pieces = (base64.b64encode(data[at : at + _PIECE]) for at in range(0, len(data), _PIECE))
        return msgspec.Raw(b'"%b"' % b"".join(pieces))
    if array.ndim == 1:
        return msgspec.Raw(msgspec.json.encode(array.tolist()))
    return msgspec.Raw(b"[%b]" % b",".join(bytes(numbers(row, None)) for row in array))


def num_tokens(texts: Sequence[ReadText]) -> int:
    """Tokens of texts."""
    return sum(len(text.ids) for text in texts)


def usage(tokens: int) -> dict[str, int]:
    """OpenAI's count of tokens."""
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}


def label(labels: Sequence[str], scores: np.ndarray) -> str:
    """The name of the label with the highest score."""
    at = int(scores.argmax())
    return labels[at] if at < len(labels) else str(at)


def ranked(scores: Sequence[float], more: Callable[[int], dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Places of texts with their scores, the best first; `more` adds to each by its place."""
    order = sorted(range(len(scores)), key=lambda at: -scores[at])
    return [{"index": at, name: scores[at], **more(at)} for at in order]


def text_of(document: Any, place: int) -> str:
    """The text of a document, which may be an object with one.

    Raises:
        ApiError: it has none.
    """
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise bad_request(
            f"documents: number {place} is {typed_repr(document)}; expected a text, or an object with one"
        )
    return text


def predicted(labels: Sequence[str], scores: np.ndarray) -> list[dict[str, Any]]:
    """Labels with their scores, the best first, as TEI has them."""
    order = np.argsort(-scores, kind="stable").tolist()
    return [{"score": float(scores[at]), "label": labels[at] if at < len(labels) else str(at)} for at in order]


def are_several(inputs: Any) -> bool:
    """True for a list of lists, as TEI has several texts; a flat list of two is a pair."""
    return isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], list)


def predicted_texts(inputs: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """The texts of TEI's inputs, or the pairs.

    Raises:
        ApiError: they are neither.
    """
    rows = inputs if are_several(inputs) else [inputs if isinstance(inputs, list) else [inputs]]
    sizes = {len(row) if isinstance(row, list) else 0 for row in rows}
    is_right = sizes in ({1}, {2}) and all(isinstance(text, str) for row in rows for text in row)
    if not is_right:
        raise bad_request("inputs: expected a text, a pair of texts, or a list of lists of one text or two", "inputs")
    if sizes == {1}:
        return [row[0] for row in rows], []
    return [], [(row[0], row[1]) for row in rows]
