"""Compares the model's tokenizer.json, which is served with the tokens that the files beside it add, with the tokenizer
that Transformers makes of the same folder.

For a known model type Transformers may take only words and merges from tokenizer.json. It then has rules of its own for
the rest (how digits, spaces and accents are split). Where somebody put another tokenizer beside such a model, the same
text then has other ids there than here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mllm_compile.text.tokenizer import Tokenizer, fault_of

# Tokenizers differ in each of these rules: spaces, digits, case, contractions, accents in two forms, code, scripts,
# emoji, line ends.
_TEXTS = (
    "Hello, world! How are you?",
    "  two  spaces\tand a tab ",
    "In 2024, 1234567 + 89.5 = 1234656.5",
    "don't STOP, I'LL go; they've",
    "café, cafe\u0301, naïve, ﬁne, Ａ",
    "def f(x_1):\n    return x_1 ** 2  # x²\n\n\n",
    "你好，世界。こんにちは 안녕 Привет مرحبا",
    "👩‍💻 🙂 http://example.org/a?b=c&d=1\r\n",
)

_MOST_TOKENS = 2000  # that a text is made of; some models reserve thousands


def tokenizer_difference(folder: Path, tokenizer: Tokenizer, *, trust_remote_code: bool = False) -> str | None:
    """Say where Transformers reads a text as other ids; None where the two agree, or where one of them reads none.

    Args:
        folder: the model's.
        tokenizer: what is served.
        trust_remote_code: the tokenizer may be Python code of the folder.
    """
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except BaseException as error:  # whatever its many classes raise: then nobody has other ids there
        fault_of(error)
        return None
    others, texts = [], [*_TEXTS, *_token_texts(tokenizer, theirs)]
    for text in texts:
        there, here = _ids(lambda text: theirs(text).input_ids, text), _ids(tokenizer.encode, text)
        if there is not None and here is not None and there != here:
            others.append((text, there, here))
    if not others:
        return None
    text, there, here = others[0]
    return (
        f"{folder}: Transformers' {type(theirs).__name__} reads {len(others)} of {len(texts)} texts as other ids than "
        f"tokenizer.json, which is served: {text!r} is {_show(there)} there and {_show(here)} here. That is "
        "right if the model was trained with tokenizer.json as it is; if it was trained through Transformers, replace "
        "the file by what AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes."
    )


def _token_texts(ours: Tokenizer, theirs: Any) -> list[str]:
    """A text with each token that either of the two adds to its vocabulary, by itself, in a word and behind spaces."""
    tokens = dict.fromkeys((*ours.added_tokens, *getattr(theirs, "added_tokens_encoder", ())))
    return [f"a{token}b  {token} c" for token in itertools.islice(tokens, _MOST_TOKENS)]


def _ids(encode: Callable[[str], Iterable[int]], text: str) -> list[int] | None:
    """The text's ids; None where the tokenizer's code fails at it, which a request with such a text will be told."""
    try:
        return list(encode(text))
    except BaseException as error:
        fault_of(error)  # raises it again where it is no tokenizer's, such as Ctrl-C
        return None


def _show(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 8 else f"[{', '.join(map(str, ids[:8]))}, …]"
