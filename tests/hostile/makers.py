"""Makes hostile values, requests, JSON and bytes of a source of chance."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import fields
from typing import Any

from mllm_compile.runtime.sampling.params import SamplingParams

NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 5, 255, 256, 2**31, 2**63, -(2**63), 10**30, 10**5000),
    *(0.0, -0.0, 0.5, 1.0, 7e-46, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")),
    *("", "a", "0", "\0", "\ud800", "é́", "🙂" * 50, "x" * 10_000, "{{ 7*7 }}", "../../etc/passwd", b"bytes"),
    *(
        [],
        [None],
        [[]],
        [0],
        [-1],
        [10**30],
        ["a", 5],
        {},
        {"a": 1},
        {5: 1e9},
        {-1: 1.0},
        {"5": float("nan")},
        (),
        {1, 2},
    ),
]
# Values that json.dumps writes; an integer may have 4300 digits there.
JSON_NASTY = [
    *(value for value in NASTY if value is None or isinstance(value, (bool, float, str, list))),
    *(0, 1, -1, 2**31, 2**63, 10**30, 10**4000, {}, {"a": 1}),
]
_NAMES = [field.name for field in fields(SamplingParams)]
_TEXTS = ["def f(x):", "The for statement", " ", "\n\n", "\u202e", "\ufffd", "🙂", "\0", "\ud800", "</s>", "a" * 300]


def prompt(chance: random.Random) -> Any:
    """A prompt that may be right, wrong in a detail, or nothing like one."""
    kind = chance.randrange(6)
    if kind == 0:
        return chance.choice(NASTY)
    if kind == 1:
        return "".join(chance.choices(_TEXTS, k=chance.randrange(6)))
    if kind == 2:
        return [chance.choice([0, 1, 5, 50, 200, -1, 10**9, 2**63, 10**30, 1.0, True, "1", None]) for _ in range(3)]
    if kind == 3:
        return [chance.randrange(256) for _ in range(chance.choice([1, 5, 60, 1000]))]
    if kind == 4:
        return {chance.choice(["prompt", "prompt_token_ids", "cache_salt", "else"]): chance.choice(NASTY)}
    return {"prompt_token_ids": [5, 6], "cache_salt": chance.choice(NASTY)}


def parameters(chance: random.Random) -> dict[str, Any]:
    """Keyword arguments of SamplingParams, some of them hostile; few tokens are asked for."""
    names = chance.sample(_NAMES, chance.randrange(4))
    return {"max_tokens": 2, "temperature": chance.choice([0, 1.0])} | {
        name: chance.choice(NASTY) for name in names if name != "n"
    }


def damaged_json(chance: random.Random, whole: Any) -> Any:
    """`whole` with a value or two in it replaced, removed, doubled or moved."""
    content = copy.deepcopy(whole)
    for _ in range(chance.randrange(1, 3)):
        holder, key = _place(chance, content)
        if holder is None:
            continue
        action = chance.randrange(5)
        if action == 0:
            del holder[key]
        elif action == 1:
            holder[key] = [holder[key]]
        elif action == 2 and isinstance(holder[key], list):
            holder[key] = holder[key] * 2
        else:
            holder[key] = copy.deepcopy(chance.choice(JSON_NASTY))
    return content


def _place(chance: random.Random, content: Any) -> tuple[Any, Any]:
    """A holder within `content`, and one of its keys."""
    holder, key = None, None
    while isinstance(content, (dict, list)) and content and (holder is None or chance.random() < 0.7):
        holder, key = content, chance.choice(list(content) if isinstance(content, dict) else range(len(content)))
        content = holder[key]
    return holder, key


def maybe_damaged(chance: random.Random, data: bytes) -> bytes:
    """Now and then cut, or with bytes of something else."""
    return damaged_bytes(chance, data) if chance.random() < 0.2 else data


def damaged_text(chance: random.Random, whole: Any) -> bytes:
    """The JSON of `whole` after damaged_json, maybe damaged once more."""
    return maybe_damaged(chance, json.dumps(damaged_json(chance, whole)).encode())


def damaged_bytes(chance: random.Random, whole: bytes) -> bytes:
    """Flipped, cut, doubled, zeroed or replaced bytes."""
    data = bytearray(whole)
    if not data:
        return b"\0"
    begin = chance.randrange(len(data))
    end = min(len(data), begin + chance.choice([1, 8, 2000]))
    action = chance.randrange(5)
    if action == 0:
        data[begin] ^= 1 << chance.randrange(8)
    elif action == 1:
        del data[begin:]
    elif action == 2:
        data[begin:end] = bytes(end - begin)
    elif action == 3:
        data[begin:begin] = data[begin:end]
    else:
        data[begin:end] = chance.randbytes(end - begin)
    return bytes(data)
