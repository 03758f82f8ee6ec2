"""The vocabulary that grammars are compiled for: the bytes of every token, and which tokens end an answer."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mllm_compile.errors import RequestError


@dataclass(frozen=True)
class Vocabulary:
    """
    Attributes:
        tokens: bytes by token id, for every row of the logits; none for special tokens and for rows without a token.
        eos_token_ids: the tokens that end an answer, at least one; special.
        marks: the other special tokens that the tokenizer has; a structural tag may name one by its id.
        no_timestamps: the id of <|notimestamps|>, behind which tokens are times; None: the tokenizer has none.
    """

    tokens: tuple[bytes, ...]
    eos_token_ids: tuple[int, ...]
    marks: tuple[int, ...] = ()
    no_timestamps: int | None = None

    @classmethod
    def of(
        cls,
        tokens: Sequence[bytes],
        eos_token_ids: Collection[int],
        special_token_ids: Collection[int] = (),
        no_timestamps: int | None = None,
    ) -> Vocabulary:
        """
        Args:
            special_token_ids: the tokenizer's.

        Raises:
            RequestError: no token ends an answer.
        """
        ends = sorted(token_id for token_id in eos_token_ids if token_id < len(tokens))
        if not ends:
            raise RequestError(
                "structured_outputs: the model names no end-of-sequence token, so an answer of a form could not end. "
                "Set eos_token_id in its generation_config.json."
            )
        marks = sorted(token_id for token_id in set(special_token_ids) - set(ends) if token_id < len(tokens))
        silent = {*ends, *marks}
        texts = tuple(b"" if token_id in silent else data for token_id, data in enumerate(tokens))
        return cls(texts, tuple(ends), tuple(marks), no_timestamps)

    @property
    def special_token_ids(self) -> list[int]:
        """Ids that are no text."""
        return [token_id for token_id, data in enumerate(self.tokens) if not data]

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask."""
        return -(-len(self.tokens) // 32)

    def to_json(self) -> str:
        """Itself as JSON text, a character a byte."""
        tokens = [data.decode("latin-1") for data in self.tokens]
        return json.dumps({"tokens": tokens, "eos": self.eos_token_ids, "marks": self.marks})

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        """The vocabulary that `to_json` has written."""
        data = json.loads(text)
        tokens = tuple(token.encode("latin-1") for token in data["tokens"])
        return cls(tokens, tuple(data["eos"]), tuple(data["marks"]))
