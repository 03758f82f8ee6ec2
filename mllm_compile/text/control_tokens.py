"""Users' texts whose special tokens are read as other text, while a chat template's own stay special.

A chat is one text when it is tokenized. So the tokens in users' texts are put between two marks before the template
renders it. The text is then cut at the marks, and text between them is tokenized without added tokens. Transformers'
`apply_chat_template(…, sanitize_control_tokens=True)` does the same, with the same marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mllm_compile.errors import RequestError
from mllm_compile.runtime.short_repr import short_repr

if TYPE_CHECKING:
    import tokenizers

_START, _END = "\U000f0000", "\U000f0001"  # of a private plane, with no meaning of their own
# Text ahead of a piece while it is tokenized: some tokenizers put a space at the start of a text.
_LINE = "\n"


def unmarked(token: str) -> str:
    """A pattern of a token in a template's text where no user has written it."""
    return f"(?<!{_START}){re.escape(token)}"


class ControlTokens:
    """The tokens of one tokenizer that templates write, and users' texts do not.

    Args:
        backend: the tokenizer.
        sources: of its chat templates; tokens that are not special count where a template writes them.
    """

    def __init__(self, backend: tokenizers.Tokenizer, sources: Iterable[str]) -> None:
        self._backend = backend
        written = "\0".join(sources)
        added = backend.get_added_tokens_decoder().values()
        self._control = _any_of(
            token.content
            for token in added
            if token.special or (token.content in written and not token.content.isspace())
        )
        self._marked = re.compile(
            f"{_START}({_any_of(token.content for token in added).pattern}){_END}|[{_START}{_END}]"
        )
        self._line_ids = encoded(backend, _LINE, False)

    def mark(self, given: Any) -> Any:
        """Put marks around the control tokens in what users gave; keys of dicts stay as they are."""
        if isinstance(given, str):
            return self._control.sub(f"{_START}\\g<0>{_END}", given.replace(_START, "").replace(_END, ""))
        if isinstance(given, Mapping):
            return {key: self.mark(value) for key, value in given.items()}
        if isinstance(given, (list, tuple)):
            return [self.mark(value) for value in given]
        return given

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that a template has rendered of what was marked.

        Raises:
            RequestError: the tokenizer makes the token itself of a control token's text.
        """
        pieces = self._marked.split(text)  # text, token, text, token, …, text; no token where a mark is alone
        ids = encoded(self._backend, pieces[0], False)
        for index, piece in enumerate(pieces[1:], start=1):
            if not piece:
                continue
            is_users = index % 2 == 1
            found = self._piece(piece, is_users)
            if is_users and self._backend.token_to_id(piece) in found:
                raise RequestError(
                    f"a text has {short_repr(piece)}, which this model's tokenizer reads as that token even where it "
                    "is told not to (model.split_special_tokens). Leave it out."
                )
            ids += found
        return ids

    def shown(self, text: str) -> str:
        """The text without marks."""
        return text.replace(_START, "").replace(_END, "")

    def _piece(self, piece: str, is_users: bool) -> list[int]:
        """A piece from the middle of a chat."""
        encode = self._without_added_tokens if is_users else self._with_added_tokens
        ids, length = encode(_LINE + piece), len(self._line_ids)
        return ids[length:] if ids[:length] == self._line_ids else encode(piece)

    def _with_added_tokens(self, text: str) -> list[int]:
        return encoded(self._backend, text, False)

    def _without_added_tokens(self, text: str) -> list[int]:
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        splits = [text]
        if backend.pre_tokenizer is not None:
            splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for split in splits for token in backend.model.tokenize(split)]


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of the tokens, the longest first; without any it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def encoded(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text.

    The library's `encode` holds Python's lock, and with it all other threads: for seconds where a text has megabytes.
    For a batch it lets go of it.
    """
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
