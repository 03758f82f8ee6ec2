"""Tokens and flags that the files beside tokenizer.json give a tokenizer, as Transformers reads them.

`tokenizer_config.json` may name tokens that tokenizer.json lacks, or change how one takes the spaces around it. It
names them by id (`added_tokens_decoder`), by use (`eos_token`, `image_token`), or in `extra_special_tokens`, a list or
a dict, which was `additional_special_tokens`. Where it has no `added_tokens_decoder`, the older
`special_tokens_map.json` and `added_tokens.json` count, too. This follows tokenization_utils_base.py of Transformers:
a new token gets the next free id, in the order of the ids that were written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mllm_compile.errors import CheckpointError
from mllm_compile.files.json_file import FileReader, HeldFiles
from mllm_compile.runtime.short_repr import short_repr, typed_repr
from mllm_compile.text.tokenizer_files import ADDED_TOKENS_FILE, SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, read_json

if TYPE_CHECKING:
    import tokenizers

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DECODER, _EXTRA, _OLDER_EXTRA = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
_SPLITS = "split_special_tokens"
_CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


@dataclass(frozen=True)
class TokenizerSettings:
    """Flags and uses of tokens, as the files say.

    Attributes:
        special_tokens: the texts of those that have a use, by its name: bos_token, eos_token, image_token, ….
        splits_special_tokens: special tokens in a text are read as other text is.
        cleans_up_spaces: spaces that were put before punctuation are taken out of what is decoded.
    """

    special_tokens: Mapping[str, str]
    splits_special_tokens: bool = False
    cleans_up_spaces: bool = False


def add_tokens(backend: tokenizers.Tokenizer, folder: Path, read: FileReader) -> TokenizerSettings:
    """Adds the tokens to `backend`, and returns what else the files say.

    Args:
        folder: the folder, as messages name it.
        read: gives its files.

    Raises:
        CheckpointError: one of them is damaged.
    """
    found = _Found(folder, backend.get_added_tokens_decoder().values())
    config = read_json(TOKENIZER_CONFIG_FILE, folder, read)
    found.take_config(config)
    if config.get(_DECODER) is None:
        found.take_map(read_json(SPECIAL_TOKENS_FILE, folder, read))
        found.take_added(read_json(ADDED_TOKENS_FILE, folder, read), backend.get_added_tokens_decoder())
    if tokens := found.new_tokens():
        backend.add_tokens(tokens)
    cleans = config.get("clean_up_tokenization_spaces") is True
    is_bpe = type(backend.model).__name__ == "BPE"
    return TokenizerSettings(
        found.texts_by_use(),
        config.get(_SPLITS) is True,
        cleans and (not is_bpe or config.get(_CLEANS_BPE) is True),
    )


def told_to_split(files: Mapping[str, bytes], folder: Path) -> dict[str, bytes]:
    """The files of a tokenizer, whose config says that special tokens in users' texts are read as other text."""
    config = read_json(TOKENIZER_CONFIG_FILE, folder, HeldFiles(files))
    return {**files, TOKENIZER_CONFIG_FILE: json.dumps({**config, _SPLITS: True}).encode()}


class _Written(NamedTuple):
    token: tokenizers.AddedToken
    has_flags: bool


class _Found:
    """The tokens of one folder's files, as they are read.

    Args:
        known: the tokens that tokenizer.json adds.
    """

    def __init__(self, folder: Path, known: Iterable[tokenizers.AddedToken]) -> None:
        self._folder = folder
        self._known = {token.content: repr(token) for token in known}
        self._by_id: dict[int, tokenizers.AddedToken] = {}
        self._extra: list[_Written] = []
        self._named: dict[str, _Written] = {}

    def take_config(self, config: Mapping[str, Any]) -> None:
        """Take the tokens that tokenizer_config.json names."""
        others = [name for name, value in config.items() if name not in _NAMES and _is_token(name, value)]
        # In Transformers' order, by ids: flags come ahead of plain texts.
        for name in (*_NAMES, *sorted(others, key=lambda name: isinstance(config[name], str))):
            self._name(TOKENIZER_CONFIG_FILE, name, config.get(name))
        self._take_extra(TOKENIZER_CONFIG_FILE, config.get(_EXTRA) or config.get(_OLDER_EXTRA))
        decoder = config.get(_DECODER) or {}
        for written, value in self._entries(TOKENIZER_CONFIG_FILE, _DECODER, decoder):
            if not (written.isascii() and written.isdigit()) or not isinstance(value, dict):
                raise self._damaged(TOKENIZER_CONFIG_FILE, _DECODER, {written: value}, "ids and tokens")
            self._by_id[int(written)] = self._token(TOKENIZER_CONFIG_FILE, _DECODER, value, is_special=False)

    def take_map(self, given: Mapping[str, Any]) -> None:
        """Take the tokens that special_tokens_map.json names; they win over the config's."""
        for name, value in given.items():
            if name.endswith("_token") and value is not None:
                self._name(SPECIAL_TOKENS_FILE, name, value)
        if given.get(_EXTRA) is not None:
            self._take_extra(SPECIAL_TOKENS_FILE, given[_EXTRA])
        elif given.get(_OLDER_EXTRA) is not None and not self._extra:
            self._take_extra(SPECIAL_TOKENS_FILE, given[_OLDER_EXTRA])

    def take_added(self, given: Mapping[str, Any], known: Mapping[int, tokenizers.AddedToken]) -> None:
        """Take the tokens of added_tokens.json, which has their ids alone, and of tokenizer.json."""
        with_use = [written for name, written in self._named.items() if name in _NAMES]
        special = {written.token.content for written in (*with_use, *self._extra)}
        for content, token_id in given.items():
            if type(token_id) is not int:
                raise self._damaged(ADDED_TOKENS_FILE, content, token_id, "an id")
            if content not in self._known:
                is_special = content in special
                self._by_id[token_id] = _made(content, special=is_special, normalized=not is_special)
        self._by_id |= known

    def new_tokens(self) -> list[tokenizers.AddedToken]:
        """The tokens that tokenizer.json has not, or with other flags, in the order of their ids to be."""
        tokens = {token.content: token for _, token in sorted(self._by_id.items())}
        fixed = self._known.keys() | tokens.keys()
        named = {name: self._named[name] for name in _NAMES if name in self._named} | self._named
        seen: set[tuple[str, bool]] = set()
        for written in (*named.values(), *self._extra):
            # Of two that were written in different ways, with flags and without, the later one counts.
            content, kind = written.token.content, (written.token.content, written.has_flags)
            if content not in fixed and kind not in seen:
                tokens[content] = written.token
                seen.add(kind)
        special = {written.token.content for written in self._named.values()}
        for content in special & tokens.keys():
            tokens[content].special = True
        return [token for content, token in tokens.items() if content and repr(token) != self._known.get(content)]

    def texts_by_use(self) -> dict[str, str]:
        """The texts of the tokens that have a use, by its name."""
        return {name: written.token.content for name, written in self._named.items()}

    def _take_extra(self, file: str, given: Any) -> None:
        if isinstance(given, dict):
            for name, value in given.items():
                self._name(file, name, value)
            return
        if given is not None and not isinstance(given, list):
            raise self._damaged(file, _EXTRA, given, "a list of tokens, or a dict of them")
        self._extra += [self._written(file, _EXTRA, value) for value in given or ()]

    def _name(self, file: str, name: str, value: Any) -> None:
        if value is not None:
            self._named[name] = self._written(file, name, value)

    def _written(self, file: str, place: str, value: Any) -> _Written:
        return _Written(self._token(file, place, value, is_special=True), isinstance(value, dict))

    def _token(self, file: str, place: str, value: Any, *, is_special: bool) -> tokenizers.AddedToken:
        """A token that is written as its text, or as a dict of its text and flags."""
        if isinstance(value, str):
            return _made(value, special=is_special)
        content = value.get("content") if isinstance(value, dict) else None
        flags = {name: value[name] for name in _FLAGS if name in value} if isinstance(value, dict) else {}
        if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
            raise self._damaged(file, place, value, "a token: a text, or a dict of its content and flags")
        return _made(content, **{"special": is_special, **flags})

    def _entries(self, file: str, place: str, given: Any) -> Iterable[tuple[str, Any]]:
        if not isinstance(given, dict):
            raise self._damaged(file, place, given, "a dict")
        return given.items()

    def _damaged(self, file: str, place: str, given: object, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder / file}: expected {short_repr(place)} to be {expected}, got {typed_repr(given)}. Correct "
            "it, or download the file again."
        )


def _is_token(name: str, value: object) -> bool:
    is_one = isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")
    return is_one and name.endswith("_token")


def _made(content: str, **flags: bool) -> tokenizers.AddedToken:
    import tokenizers

    return tokenizers.AddedToken(content, **flags)
