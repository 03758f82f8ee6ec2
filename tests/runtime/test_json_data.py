"""JSON from elsewhere: within bounds, and of the types that dataclasses say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.files.json_data import MAX_DEPTH, MAX_VALUES, from_json, parse_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_what_json_writes_is_read(value):
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[" * 100_000, "nested more than"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested more than"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "nested more than"),
        (b"[" + b"[]," * MAX_VALUES + b"[]]", "more than 2,000,000 values"),
        (b'{"layers": ' + b"9" * 5000 + b"}", "an integer of 5000 digits"),
        (b"[-" + b"9" * 41 + b"]", "an integer of 42 digits"),
        (b"\xff\xfe", "codec can't decode"),
        (b"", "Expecting value"),
    ],
)
def test_json_beyond_a_bound_is_one_value_error(data, said):
    with pytest.raises(ValueError, match=said):
        parse_json(data)


def test_json_at_its_bounds_is_read():
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert parse_json(b"[" + b"9" * 40 + b"]") == [10**40 - 1]
    assert parse_json(b'["' + b"9" * 5000 + b'"]') == ["9" * 5000]


@dataclass(frozen=True)
class Inner:
    size: int
    kind: Literal["a", "b"]


@dataclass(frozen=True)
class Outer:
    name: str
    scale: float
    flag: bool
    dtype: torch.dtype
    inner: Inner | None
    sizes: tuple[int, ...]
    pair: tuple[int, str]
    by_name: Mapping[str, Inner]
    steps: tuple[tuple[str | int, ...], ...] = ()


WHOLE = Outer("x", 1.5, True, torch.float16, Inner(1, "a"), (1, 2), (3, "c"), {"k": Inner(2, "b")}, (("narrow", 1),))
AS_JSON = json.loads(json.dumps(asdict(WHOLE) | {"dtype": "float16"}))


def test_what_was_a_dataclass_is_one_again():
    assert from_json(Outer, AS_JSON) == WHOLE
    assert from_json(Outer, AS_JSON | {"inner": None, "scale": 2}).scale == 2.0


WRONG = [None, True, 5, 1.5, "text", [], {}, [[]], {"size": 1}, [None]]
FITTING = {
    "name": ["text"],
    "scale": [5, 1.5],
    "flag": [True],
    "dtype": [],
    "inner": [None],
    "sizes": [[]],
    "pair": [],
    "by_name": [{}],
    "steps": [[], [[]]],
}


@pytest.mark.parametrize("field", AS_JSON)
def test_a_field_of_another_type_is_refused_by_its_name(field):
    refused = [value for value in WRONG if not any(value is fit or value == fit for fit in FITTING[field])]
    for value in refused + ([5] if field in ("flag",) else []):
        with pytest.raises(ValueError, match=rf"^{field}[:.]"):
            from_json(Outer, AS_JSON | {field: value})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inner": {"size": True, "kind": "a"}}, r"inner\.size: expected int, got bool True"),
        ({"inner": {"size": 1, "kind": "c"}}, r"inner\.kind: expected .*'a', 'b'.*, got str 'c'"),
        ({"by_name": {"k": {"size": 1}}}, r"by_name\.k: expected a key 'kind' in Inner"),
        ({"more": 1}, "expected no key 'more' in Outer"),
        ({"dtype": "Tensor"}, "dtype: expected dtype, got str 'Tensor'"),
    ],
)
def test_the_message_says_where(changes, said):
    with pytest.raises(ValueError, match=said):
        from_json(Outer, AS_JSON | changes)


def test_a_missing_key_is_named():
    with pytest.raises(ValueError, match="expected a key 'name' in Outer"):
        from_json(Outer, {key: value for key, value in AS_JSON.items() if key != "name"})
