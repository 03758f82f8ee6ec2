"""Encodes texts that are cut to a number of tokens, special ones included, which stay around what is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers


def cut_encodings(
    backend: tokenizers.Tokenizer, texts: Sequence[str] | Sequence[tuple[str, str]], most_tokens: int
) -> list[tokenizers.Encoding]:
    """The encodings of texts, or of pairs; of a pair the longer one is cut first, as Transformers does."""
    flat = [part for text in texts for part in ((text,) if isinstance(text, str) else text)]
    encoded = iter(backend.encode_batch(flat, add_special_tokens=False))
    found = []
    for text in texts:
        parts: list[Any] = [next(encoded) for _ in range(1 if isinstance(text, str) else 2)]
        room = max(0, most_tokens - backend.num_special_tokens_to_add(len(parts) == 2))
        for part, length in zip(parts, _lengths([len(part.ids) for part in parts], room), strict=True):
            if length < len(part.ids):
                part.truncate(length)
        found.append(backend.post_process(parts[0], parts[1] if len(parts) == 2 else None, True))
    return found


def _lengths(lengths: list[int], room: int) -> list[int]:
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    shorter = min(first, second, room // 2)
    return [shorter, min(second, room - shorter)] if first <= second else [min(first, room - shorter), shorter]
