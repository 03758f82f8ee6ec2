"""Reads texts for a model that pools: a text, token ids or a pair become token ids, checked, on the caller's thread."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mllm_compile.errors import RequestError
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.runtime.short_repr import short_repr, typed_repr

if TYPE_CHECKING:
    from mllm_compile.text.tokenizer import Tokenizer

# A text, token ids, or vLLM's dict of either.
TextPrompt = str | Sequence[int] | Mapping[str, Any]
TextPrompts = TextPrompt | Sequence[TextPrompt]
_KEYS = ("prompt", "prompt_token_ids")
_MOST_TEXTS = 65_536  # of a call
_MOST_CHARACTERS = 64 << 20  # of the pairs of a call: one long query is in each
_PLACES = re.compile(r"\{(query|document)\}")
_LETTERS = 4  # of a token, about
_PORTION = 4 << 20  # characters that are tokenized at once: a tokenizer takes 100 bytes for each token


@dataclass(frozen=True, eq=False)
class ReadText:
    """A text as token ids.

    Attributes:
        ids: [n] int64, at least one.
        kinds: [n] int64, or None: all 0.
        skipped: its first tokens, a prompt's, that means leave out.
    """

    ids: np.ndarray
    kinds: np.ndarray | None = None
    skipped: int = 0


class TextReader:
    """Reads texts of one model; thread-safe.

    Args:
        tokenizer: None: the model has none, and takes token ids alone.
        vocab_size: rows of its embedding.
        most_tokens: of a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, facts: PoolingFacts, vocab_size: int, most_tokens: int) -> None:
        self._tokenizer, self._facts = tokenizer, facts
        self._vocab_size, self.most_tokens = vocab_size, most_tokens

    def read(
        self, prompts: TextPrompts, *, prompt_name: str | None = None, cut_to: int | None = None
    ) -> list[ReadText]:
        """The texts, in their order.

        Args:
            prompt_name: of the prompts of the model's files, the one that goes ahead of each; None: its default, if it
                has one.
            cut_to: the most tokens of a text, whose rest is cut; -1: as many as the model takes; None: longer texts
                are refused.

        Raises:
            RequestError: one is refused, or there is none.
        """
        return self._read(_listed_raw(prompts), 0, prompt_name, cut_to)

    def parts(
        self,
        prompts: TextPrompts,
        most_tokens: int,
        *,
        prompt_name: str | None = None,
        cut_to: int | None = None,
    ) -> list[Callable[[], list[ReadText]]]:
        """The texts as `read` gives them, in parts of about `most_tokens` together. Each part is read, and may be
        refused, when it is called."""
        listed, most_of_text = _listed_raw(prompts), self._most(cut_to)
        edges = [0]
        while edges[-1] < len(listed):
            edges.append(_about_as_many(listed, edges[-1], most_tokens, most_of_text))
        return [partial(self._read, listed[one:other], one, prompt_name, cut_to) for one, other in pairwise(edges)]

    def _read(self, listed: Sequence[Any], begin: int, prompt_name: str | None, cut_to: int | None) -> list[ReadText]:
        """Args: begin: the place of the first one in the call, for messages."""
        listed = [_content(one) for one in listed]
        prefix = self._prompt(prompt_name)
        most = self._most(cut_to)
        texts = [self._lower(prefix + one) if isinstance(one, str) else None for one in listed]
        encoded = self._encoded([text for text in texts if text is not None], cut_to, most)
        skipped = 0
        if self._leaves_prompt_out(prefix):
            skipped = len(next(self._encoded([self._lower(prefix)], None, most))[0]) - 1
        found = []
        for place, (one, text) in enumerate(zip(listed, texts, strict=True), begin):
            if text is None:
                found.append(self._of_ids(one, place, cut_to, most))
            else:
                found.append(self._text(*next(encoded), place, skipped))
        return self._checked(found, begin)

    def read_pairs(self, pairs: Sequence[tuple[TextPrompt, TextPrompt]], cut_to: int | None = None) -> list[ReadText]:
        """Pairs as one text each, as a cross-encoder reads them; arguments and errors as `read`."""
        if not pairs:
            raise _no_texts()
        _check_number(len(pairs))
        for one in pairs:
            if not all(isinstance(text, str) for text in one):
                raise RequestError("a pair has token ids; expected two texts, between which the tokenizer writes")
        template = self._facts.score_template
        if template is not None and cut_to is not None:
            raise RequestError(
                "truncate_prompt_tokens is set, and a pair is read by model.score_template, whose end would be cut. "
                "Leave it out, and shorten the documents."
            )
        around = 0 if template is None else len(template)
        characters = sum(around + len(one) + len(other) for one, other in pairs)
        if characters > _MOST_CHARACTERS:
            raise RequestError(
                f"the pairs have {characters:,} characters together; expected at most {_MOST_CHARACTERS:,}. Send them "
                "in parts."
            )
        texts: Any = [(self._lower(str(one)), self._lower(str(other))) for one, other in pairs]
        if template is not None:
            parts = _PLACES.split(template)
            texts = ["".join(_filled(parts, {"query": one, "document": other})) for one, other in texts]
        encoded = self._encoded(texts, cut_to, self._most(cut_to))
        return self._checked([self._text(*one, place, 0) for place, one in enumerate(encoded)])

    def _encoded(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], cut_to: int | None, most: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Token ids and kinds of each; made in portions."""
        if self._tokenizer is None:
            raise RequestError("the model has no tokenizer. Give token ids.")
        portion: list[Any] = []
        size = 0
        for number, text in enumerate(texts):
            portion.append(text)
            size += len(text) if isinstance(text, str) else sum(map(len, text))
            if size >= _PORTION or number == len(texts) - 1:
                yield from self._tokenizer.encode_texts(portion, None if cut_to is None else most)
                portion, size = [], 0

    def _prompt(self, name: str | None) -> str:
        known = self._facts.prompts
        if name is not None and name not in known:
            raise RequestError(f"prompt_name: the model has no prompt {short_repr(name)}; it has: {_listed(known)}")
        chosen = self._facts.default_prompt if name is None else name
        return "" if chosen is None else known[chosen]

    def _leaves_prompt_out(self, prefix: str) -> bool:
        return bool(prefix) and not self._facts.pools_prompt

    def _lower(self, text: str) -> str:
        return text.lower() if self._facts.lower_case else text

    def _most(self, cut_to: int | None) -> int:
        if cut_to is None or cut_to == -1:
            return self.most_tokens
        if type(cut_to) is not int or not 1 <= cut_to <= self.most_tokens:
            raise RequestError(
                f"truncate_prompt_tokens is {short_repr(cut_to)}; expected 1 to {self.most_tokens}, or -1 for as many "
                "as fit"
            )
        return cut_to

    def _of_ids(self, prompt: Any, place: int, cut_to: int | None, most: int) -> ReadText:
        ids = prompt if cut_to is None else prompt[:most]
        return self._text(ids, None, place, 0)

    def _text(self, ids: Any, kinds: Any, place: int, skipped: int) -> ReadText:
        try:
            array = np.asarray(ids, dtype=np.int64)
        except OverflowError:
            raise self._wrong_id(ids, place) from None
        if not len(array):
            raise RequestError(f"text {place} has no tokens; expected one at least")
        if len(array) > self.most_tokens:
            raise RequestError(
                f"text {place} has {len(array):,} tokens; the model takes {self.most_tokens:,}. Shorten it, or set "
                "truncate_prompt_tokens: -1 to cut it."
            )
        of_kinds = None
        if kinds is not None and self._facts.kinds > 1 and any(kinds):
            of_kinds = np.minimum(np.asarray(kinds, dtype=np.int64), self._facts.kinds - 1)
        return ReadText(array, of_kinds, min(skipped, len(array) - 1))

    def _checked(self, texts: list[ReadText], begin: int = 0) -> list[ReadText]:
        """The texts, whose ids are of the vocabulary: all are looked at in one, as numpy takes microseconds a call."""
        ids = np.concatenate([text.ids for text in texts])
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            for place, text in enumerate(texts, begin):
                if text.ids.min() < 0 or text.ids.max() >= self._vocab_size:
                    raise self._wrong_id(text.ids, place)
        end = self._facts.end_id
        if end is not None:
            for place, text in enumerate(texts, begin):
                if text.ids[-1] != end:
                    raise RequestError(
                        f"text {place} ends with token id {text.ids[-1]}; expected {end}, at which the model's head "
                        "reads. Give a text, or ids with it."
                    )
        return texts

    def _wrong_id(self, ids: Any, place: int) -> RequestError:
        wrong = next(int(one) for one in ids if not 0 <= one < self._vocab_size)
        return RequestError(f"text {place} has token id {short_repr(wrong)}; expected 0 to {self._vocab_size - 1}")


def _filled(parts: Sequence[str], texts: Mapping[str, str]) -> Iterator[str]:
    """The parts of a filled template; every second part is the name of a text. No text is searched for names."""
    for number, part in enumerate(parts):
        yield texts[part] if number % 2 else part


def listed_prompts(prompts: TextPrompts) -> list[str | Sequence[int]]:
    """The prompts as a list, of one or of several.

    Raises:
        RequestError: there are no prompts, there are too many, or one is neither a text nor token ids.
    """
    return [_content(one) for one in _listed_raw(prompts)]


def _listed_raw(prompts: TextPrompts) -> list[Any]:
    """The prompts as a list, whose contents are not looked at yet; errors of their number alone."""
    if isinstance(prompts, str | Mapping) or _are_ids(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence) and not hasattr(prompts, "tolist"):
        raise RequestError(f"prompts: expected texts or token ids, got {typed_repr(prompts)}")
    listed = list(prompts)
    if not listed:
        raise _no_texts()
    _check_number(len(listed))
    return listed


def _about_as_many(listed: Sequence[Any], begin: int, most_tokens: int, most_of_text: int) -> int:
    """Where the prompts end, from `begin` on, that have about as many tokens together, each cut to `most_of_text`."""
    tokens = 0
    for number in range(begin, len(listed)):
        if tokens >= most_tokens:
            return number
        one = listed[number]
        if type(one) is not list and isinstance(one, Mapping):
            one = next(iter(one.values()), ())
        size = len(one) if isinstance(one, Sequence) or getattr(one, "ndim", 0) == 1 else 1
        tokens += min(most_of_text, -(-size // _LETTERS) if isinstance(one, str) else size)
    return len(listed)


def _check_number(texts: int) -> None:
    if texts > _MOST_TEXTS:
        raise RequestError(f"there are {texts:,} texts; expected at most {_MOST_TEXTS:,}. Send them in parts.")


def _content(prompt: Any) -> str | Sequence[int]:
    if type(prompt) is not list and isinstance(prompt, Mapping):
        keys = [key for key in _KEYS if key in prompt]
        if len(keys) != 1 or len(prompt) != 1:
            raise RequestError(f"a prompt has the keys {short_repr(list(prompt))}; expected one of {', '.join(_KEYS)}")
        prompt = prompt[keys[0]]
    if isinstance(prompt, str) or _are_ids(prompt):
        found: str | Sequence[int] = prompt
        return found
    raise RequestError(f"a prompt is {typed_repr(prompt)}; expected a text or token ids")


def _are_ids(prompt: Any) -> bool:
    """True for a list or an array of whole numbers; an empty list is no text."""
    if type(prompt) is list and set(map(type, prompt)) == {int}:  # ten times as fast as what follows
        return True
    if hasattr(prompt, "ndim"):
        return bool(prompt.ndim == 1 and np.asarray(prompt).dtype.kind in "iu")
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes) or not prompt:
        return False
    return all(isinstance(one, numbers.Integral) and not isinstance(one, bool) for one in prompt)


def _no_texts() -> RequestError:
    return RequestError("there is no text; expected one at least")


def _listed(names: Mapping[str, str]) -> str:
    return ", ".join(names) or "none"
