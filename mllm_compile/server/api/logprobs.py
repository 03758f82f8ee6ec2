"""Log-probabilities in the three shapes that clients read: chat's, completions' older one, and vLLM's of prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from mllm_compile.server.wire.messages import Scores
from mllm_compile.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no -inf
_OPEN = "\ufffd"


def floored(logprob: float) -> float:
    """A log-probability as JSON can hold it: of a token without probability -9999, as vLLM tells it."""
    return max(logprob, _LEAST)


class TokenTexts:
    """Tokens as text and bytes, by their entries in the vocabulary.

    Args:
        as_ids: name them `token_id:5`, which a client can take apart again.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._bytes_of = None if tokenizer is None else tokenizer.bytes_of_token
        self._special = frozenset[int]() if tokenizer is None else tokenizer.special_token_ids
        self._as_ids = as_ids or tokenizer is None

    def bytes_of(self, token_id: int) -> bytes:
        return b"" if self._bytes_of is None else self._bytes_of(token_id)

    def text_of(self, token_id: int) -> str:
        r"""The token's text; a part of a character is U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self.bytes_of(token_id).decode(errors="replace")

    def name_of(self, token_id: int) -> str:
        r"""The token's text, or `bytes:\xe2` for a part of a character: names of a dict should differ."""
        text = self.text_of(token_id)
        return "bytes:" + "".join(f"\\x{b:02x}" for b in self.bytes_of(token_id)) if _OPEN in text else text

    def offsets_in(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Where each token of a prompt begins in its text: the characters that are whole before it.

        A text need not have what its tokens have: special tokens that were added to it, and the space that some
        tokenizers put before the first word.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        offsets = []
        offset = 0
        for token_id in token_ids:
            offsets.append(offset)
            piece = decoder.decode(self.bytes_of(token_id))
            if not text.startswith(piece, offset):
                if token_id in self._special:
                    continue
                if not offset:
                    piece = piece.removeprefix(" ")
            offset = min(len(text), offset + len(piece))
        return offsets


def chat_logprobs(texts: TokenTexts, scores: Sequence[Scores]) -> dict[str, Any]:
    """The shape of /v1/chat/completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = texts.bytes_of(token_id)
        return {"token": texts.text_of(token_id), "logprob": floored(logprob), "bytes": list(data)}

    return {
        "content": [
            {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*alternative) for alternative in one.top]}
            for one in scores
        ]
    }


def completion_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], scores: Sequence[Scores | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """The shape of /v1/completions.

    Args:
        scores: of each token; None for a prompt's first, which nothing predicts.
        offsets: of each token in the text.
    """
    return {
        "tokens": [texts.name_of(token_id) for token_id in token_ids],
        "token_logprobs": [None if one is None else floored(one.logprob) for one in scores],
        "top_logprobs": [None if one is None else _top(texts, one) for one in scores],
        "text_offset": offsets,
    }


def _top(texts: TokenTexts, scores: Scores) -> dict[str, float]:
    """The alternatives, and the token itself if it is not among them."""
    top = {texts.name_of(token_id): floored(logprob) for token_id, logprob in scores.top}
    top.setdefault(texts.name_of(scores.token_id), floored(scores.logprob))
    return top


def prompt_logprobs(texts: TokenTexts, scores: Sequence[Scores]) -> list[dict[str, Any] | None]:
    """vLLM's shape of a prompt: by token id; None for its first token."""
    entries: list[dict[str, Any] | None] = [None]
    for one in scores:
        entry = {one.token_id: (one.logprob, one.rank)}
        for rank, (token_id, logprob) in enumerate(one.top, start=1):
            entry.setdefault(token_id, (logprob, rank))
        entries.append(
            {
                str(token_id): {
                    "logprob": floored(logprob),
                    "rank": rank,
                    "decoded_token": texts.text_of(token_id),
                }
                for token_id, (logprob, rank) in entry.items()
            }
        )
    return entries
