"""Judges if a backend keeps to a schema: by answers drawn from its grammar, and by texts that it must not take.

The judge is the package `jsonschema`; for formats that it leaves to other packages, the expressions below.
"""

from __future__ import annotations

import ipaddress
import json
import random
import re
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from mllm_compile.runtime.sampling.grammar import MaskWork
from mllm_compile.structured.form import Form, Refused
from tests.structured.draws import allowed_ids

_DATA = json.loads(Path(__file__).with_name("schema_cases.json").read_text(encoding="utf-8"))
CASES: dict[str, list[Any]] = _DATA["schemas"]  # of each keyword, alone and beside others, with values at the edges
TEXTS: list[str] = _DATA["texts"]  # of JSON, right for some of the schemas and wrong for others

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_URI = r"[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_DURATION = r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)"


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.ASCII) is not None


def _is_date_time(text: str) -> bool:
    day, _, time = text.upper().partition("T")
    date.fromisoformat(day)
    return re.fullmatch(_TIME, time, re.ASCII) is not None and len(day) == 10


_OWN_FORMATS: dict[str, Callable[[str], Any]] = {
    "date": lambda text: len(text) == 10 and date.fromisoformat(text),
    "time": _matches(_TIME),
    "date-time": _is_date_time,
    "duration": _matches(_DURATION),
    "email": lambda text: re.fullmatch(r'(?:[^@\s"]+|"[^"]*")@[^@\s]+', text),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "hostname": lambda text: len(text) < 254 and re.fullmatch(rf"{_LABEL}(?:\.{_LABEL})*", text),
    "uri": _matches(_URI),
}


@cache
def _formats() -> jsonschema.FormatChecker:
    checker = jsonschema.FormatChecker()
    for name, is_one in _OWN_FORMATS.items():
        checker.checks(name, ValueError)(lambda value, is_one=is_one: not isinstance(value, str) or bool(is_one(value)))
    return checker


def exact(text: str) -> Any:
    """JSON data with decimal fractions, as a float's would be no multiple of 0.1."""
    return json.loads(text, parse_float=Decimal)


def validator(schema: Any) -> Any:
    """Of the draft that the schema is written in."""
    text = json.dumps(schema)
    is_old = '"items": [' in text or any(f'"{key}"' in text for key in ("additionalItems", "dependencies"))
    kind = jsonschema.Draft7Validator if is_old else jsonschema.Draft202012Validator
    kind.check_schema(schema)
    return kind(exact(text), format_checker=_formats())


def is_right(judge: Any, text: bytes) -> bool:
    try:
        return judge.is_valid(exact(text.decode()))
    except ValueError:
        return False
    except ArithmeticError:  # an exponent beyond what the judge computes with
        return True


@cache
def _token_of_byte(vocabulary: Any) -> dict[int, int]:
    return {data[0]: token_id for token_id, data in enumerate(vocabulary.tokens) if len(data) == 1}


def takes(backend: Any, grammar: Any, text: str) -> bool:
    """True if this may be a whole answer."""
    ids = [_token_of_byte(backend.vocabulary)[byte] for byte in text.encode()]
    mask = np.zeros((1, backend.vocabulary.mask_words), np.int32)
    is_taken = not backend.fill([MaskWork(grammar.matcher(), ids, 0)], mask)
    return is_taken and backend.vocabulary.eos_token_ids[0] in allowed_ids(mask[0])


def draw(backend: Any, grammar: Any, chance: random.Random, most_tokens: int = 60) -> bytes | None:
    """A random answer that tends to its end, None if it has not come there."""
    vocabulary, matcher = backend.vocabulary, grammar.matcher()
    closing = [vocabulary.tokens.index(mark) for mark in (b'"', b"}", b"]")]
    text, new = b"", []
    for count in range(most_tokens):
        mask = np.zeros((1, vocabulary.mask_words), np.int32)
        if backend.fill([MaskWork(matcher, new, 0)], mask):
            return None
        allowed = {token_id for token_id in allowed_ids(mask[0]) if token_id < len(vocabulary.tokens)}
        if allowed & set(vocabulary.eos_token_ids) and (len(allowed) == 1 or chance.random() < 0.6):
            return text
        allowed -= set(vocabulary.eos_token_ids)
        ends = [mark for mark in closing if mark in allowed]
        if not allowed:
            return None
        takes_end = ends and (count > most_tokens / 3 or chance.random() < 0.3)
        new = [chance.choice(ends if takes_end else sorted(allowed))]
        text += vocabulary.tokens[new[0]]
    return None


def wrong_answers(backend: Any, schema: Any, draws: int = 6) -> Iterator[str]:
    """Answers that the backend allows and the schema does not describe.

    Raises:
        Refused: the backend refuses the schema.
    """
    grammar = backend.compile(Form("json", json.dumps(schema), is_compact=True))
    judge = validator(schema)
    for text in TEXTS:
        if not is_right(judge, text.encode()) and takes(backend, grammar, text):
            yield text
    for seed in range(draws):
        answer = draw(backend, grammar, random.Random(seed))
        if answer is not None and not is_right(judge, answer):
            yield answer.decode(errors="replace")


def refusal(backend: Any, schema: Any) -> str | None:
    """Why the backend refuses a schema, None if it takes it."""
    try:
        backend.compile(Form("json", json.dumps(schema), is_compact=True))
    except Refused as refused:
        return str(refused)
    return None
