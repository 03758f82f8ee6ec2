"""Masks of both backends: the same as a slow reference's that tries every token; forms that are refused."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import regex

from mllm_compile.runtime.sampling.grammar import MaskWork
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.structured import xgrammar_backend
from mllm_compile.structured.backend import make_backend
from mllm_compile.structured.form import Form, Refused
from tests.hang_guard import HANG_S
from tests.structured.draws import allowed_ids, walk

CHOICES = ["yes", "no", "yes, but", "€5", "naïve", "日本", 'a "quoted" \\ text\n', "/slash/", "\x7f\x01", "😀"]
FLAT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FLAT_PATTERN = rb'\{"a":-?(?:0|[1-9][0-9]*),"b":"(?:x|\xc3\xa9)"\}'
# A form, and the bytes that have it as a regular expression.
CASES = {
    "words": ({"regex": r"(the|then|there) [a-z]+x"}, rb"(the|then|there) [a-z]+x"),
    "anchors": ({"regex": r"a{2,4}-[0-9]{1,3}"}, rb"a{2,4}-[0-9]{1,3}"),
    "optional": ({"regex": r"(ab?c*|[^a-z ]){0,3}"}, None),
    "choice": ({"choice": CHOICES}, b"|".join(regex.escape(text.encode(), special_only=True) for text in CHOICES)),
    "gbnf": ({"grammar": 'root ::= "for " v " in " v\nv ::= [a-c] | [a-c] v'}, rb"for [a-c]+ in [a-c]+"),
    "lark": ({"grammar": 'start: "for " V " in " V\nV: /[a-c]+/'}, rb"for [a-c]+ in [a-c]+"),
    "json": ({"json": FLAT, "disable_any_whitespace": True}, FLAT_PATTERN),
}


def compiled(backend, **form):
    return backend.compile(Form.of(StructuredOutputsParams(**form)))


def reference(pattern: bytes, vocabulary) -> Callable[[bytes], set[int]]:
    """The tokens that may follow a text, by trying each."""
    expression = regex.compile(pattern)

    def allowed(text: bytes) -> set[int]:
        fits = {
            token_id
            for token_id, data in enumerate(vocabulary.tokens)
            if data and expression.fullmatch(text + data, partial=True)
        }
        return fits | (set(vocabulary.eos_token_ids) if expression.fullmatch(text) else set())

    return allowed


@pytest.mark.parametrize("name", [name for name, (_, pattern) in CASES.items() if pattern is not None])
def test_a_mask_is_what_trying_every_token_gives(backend, vocabulary, name):
    form, pattern = CASES[name]
    grammar, expected = compiled(backend, **form), reference(pattern, vocabulary)
    texts = set()
    for seed in range(4):
        for text, allowed in walk(backend, grammar, random.Random(seed), most_tokens=12):
            assert allowed == expected(text), text
            texts.add(text)
    assert len(texts) > 5


@pytest.mark.parametrize("name", CASES)
def test_an_answer_that_ends_has_the_form(backend, name):
    form, pattern = CASES[name]
    grammar = compiled(backend, **form)
    for seed in range(5):
        text, allowed = list(walk(backend, grammar, random.Random(seed)))[-1]
        if set(backend.vocabulary.eos_token_ids) <= allowed and pattern is not None:
            assert regex.fullmatch(pattern, text)


def test_special_tokens_and_rows_without_a_token_are_never_allowed(backend, vocabulary):
    grammar = compiled(backend, regex=r"(.|\n)*")
    for _, allowed in walk(backend, grammar, random.Random(1), most_tokens=5):
        assert not {token_id for token_id, data in enumerate(vocabulary.tokens) if not data} & allowed - set(
            vocabulary.eos_token_ids
        )
        assert set(vocabulary.eos_token_ids) <= allowed


def test_a_resumed_matcher_is_where_the_first_was(backend):
    grammar = compiled(backend, json=FLAT)
    chance = random.Random(2)
    matcher, taken = grammar.matcher(), []
    mask, again = (np.zeros((2, backend.vocabulary.mask_words), np.int32) for _ in range(2))
    for _ in range(12):
        assert not backend.fill([MaskWork(matcher, taken[-1:], 1)], mask)
        assert not backend.fill([MaskWork(grammar.matcher(), taken, 0)], again)
        assert (mask[1] == again[0]).all()
        choices = allowed_ids(mask[1]) - set(backend.vocabulary.eos_token_ids)
        if not choices:
            break
        taken.append(chance.choice(sorted(choices)))
    assert len(taken) > 3


def test_a_batch_gives_each_matcher_its_own_mask(backend):
    grammars = [compiled(backend, **form) for form, _ in CASES.values()]
    alone = np.zeros((len(grammars), backend.vocabulary.mask_words), np.int32)
    for row, grammar in enumerate(grammars):
        assert not backend.fill([MaskWork(grammar.matcher(), [], row)], alone)
    together = np.zeros_like(alone)
    rows = list(range(len(grammars)))[::-1]
    assert not backend.fill([MaskWork(grammars[row].matcher(), [], row) for row in rows], together)
    assert (alone == together).all()


@pytest.mark.parametrize("name", CASES)
def test_masks_behind_drafted_tokens_are_those_behind_taken_ones(backend, vocabulary, name):
    """Drafts of allowed tokens, with any token at some place; no draft is taken for good."""
    grammar, chance, most = compiled(backend, **CASES[name][0]), random.Random(3), 5
    matcher, taken, num_cut = grammar.matcher(), [], 0
    for _ in range(12):
        expected = np.zeros((1 + most, vocabulary.mask_words), np.int32)
        masks = np.full_like(expected[: most + 1].repeat(2, axis=0), 7)
        drafted, is_right = [], True
        for place in range(1 + most):
            if is_right:
                assert not backend.fill([MaskWork(grammar.matcher(), taken + drafted, place)], expected)
            choices = allowed_ids(expected[place]) - set(vocabulary.eos_token_ids)
            if place == most or not (choices or drafted):
                break
            is_any = not choices or chance.random() < 0.2
            drafted.append(chance.choice(range(5, len(vocabulary.tokens)) if is_any else sorted(choices)))
            is_right = is_right and drafted[-1] in choices
        num_cut += not is_right
        work = [MaskWork(matcher, taken[-1:], 1, drafted), MaskWork(grammar.matcher(), taken, 0)]
        assert not backend.fill(work, masks)
        assert (masks[0] == expected[0]).all()
        assert (masks[work[0].rows] == expected[: 1 + len(drafted)]).all()
        choices = allowed_ids(expected[0]) - set(vocabulary.eos_token_ids)
        if not choices:
            break
        taken.append(chance.choice(sorted(choices)))
    assert num_cut > 0


def test_a_token_that_is_not_allowed_is_a_fault_of_its_row_alone(backend, vocabulary):
    grammar = compiled(backend, regex="[a-c]+")
    token_of = {data: token_id for token_id, data in enumerate(vocabulary.tokens)}
    masks = np.zeros((2, vocabulary.mask_words), np.int32)
    work = [MaskWork(grammar.matcher(), [token_of[b"x"]], 0), MaskWork(grammar.matcher(), [token_of[b"a"]], 1)]
    faults = backend.fill(work, masks)
    assert list(faults) == [0]
    assert token_of[b"b"] in allowed_ids(masks[1])


def most_spaces(backend, matcher, begin: bytes) -> int:
    """Spaces that may follow a text."""
    tokens = backend.vocabulary.tokens
    space, new = tokens.index(b" "), [tokens.index(bytes([byte])) for byte in begin]
    for num_spaces in range(100):
        mask = np.zeros((1, backend.vocabulary.mask_words), np.int32)
        assert not backend.fill([MaskWork(matcher, new, 0)], mask)
        if space not in allowed_ids(mask[0]):
            return num_spaces
        new = [space]
    return 100


def test_whitespace_in_json_has_an_end(backend):
    assert most_spaces(backend, compiled(backend, json=FLAT).matcher(), b"{") == 32


@pytest.mark.parametrize("is_old", [False, True])
def test_whitespace_in_the_json_of_a_structural_tag_has_an_end(backend, is_old):
    content = {"type": "json_schema", "json_schema": FLAT}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}
    if is_old:
        tag = {"structures": [{"begin": "<f>", "schema": FLAT, "end": "</f>"}], "triggers": ["<f"]}
    assert most_spaces(backend, compiled(backend, structural_tag=tag).matcher(), b"<f>{") == 32


def test_additional_properties_are_allowed_unless_they_are_disabled(backend, vocabulary):
    open_schema = {"type": "object", "properties": {"a": {"type": "integer"}, "o": {"properties": {}}}}
    quote = vocabulary.tokens.index(b'"')
    begin = [vocabulary.tokens.index(b"{"), quote]
    z = vocabulary.tokens.index(b"z")
    for disabled in (False, True):
        form = {"json": open_schema, "disable_any_whitespace": True, "disable_additional_properties": disabled}
        mask = np.zeros((1, vocabulary.mask_words), np.int32)
        assert not backend.fill([MaskWork(compiled(backend, **form).matcher(), begin, 0)], mask)
        assert (z in allowed_ids(mask[0])) is not disabled


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"regex": "(((("}, "unclosed group|parenthesis is not closed"),
        ({"regex": r"(?=a)b"}, "look-around|Lookahead"),
        ({"regex": r"(a)\1"}, "backreferences|Backreference"),
        ({"grammar": "root ::= other"}, "'other' not found|\"other\" is not defined"),
        ({"grammar": "nonsense $$"}, "."),
        ({"json": {"type": "wat"}}, 'Invalid type: wat|Unsupported type "wat"'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"$ref": "http://example.org/schema"}}, "\\$ref to another document|not present in a registry"),
        ({"json": {"type": "string", "format": "nonsense"}}, "nonsense"),
    ],
)
def test_a_form_that_is_wrong_or_not_kept_to_is_refused_in_words(backend, form, said):
    with pytest.raises(Refused, match=said) as refused:
        compiled(backend, **form)
    assert len(str(refused.value)) < 600
    assert "\n" not in str(refused.value)


# --- one backend's own ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llguidance(vocabulary):
    return make_backend("llguidance", vocabulary, threads=2)


@pytest.fixture(scope="module")
def xgrammar(vocabulary):
    return make_backend("xgrammar", vocabulary, threads=1)


def test_llguidance_takes_no_options_in_a_grammar(llguidance):
    with pytest.raises(Refused, match=r"Remove the line with %llguidance"):
        compiled(llguidance, grammar='%llguidance {"no_forcing": false}\nstart: "a"')


def test_llguidance_takes_a_pattern_of_whitespace(llguidance, vocabulary):
    grammar = compiled(llguidance, json=FLAT, whitespace_pattern=r"\n{0,2}")
    mask = np.zeros((1, vocabulary.mask_words), np.int32)
    llguidance.fill([MaskWork(grammar.matcher(), [vocabulary.tokens.index(b"{")], 0)], mask)
    following = {vocabulary.tokens[token_id][:1] for token_id in allowed_ids(mask[0])}
    assert following == {b"\n", b'"'}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf"),
        ({"oneOf": [{"type": "integer"}]}, "oneOf"),
        ({"type": "object", "properties": {"x": {"type": "array", "contains": {}}}}, "contains"),
        ({"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer"}}}, r"\$ref beside maximum"),
        ({"type": "string", "pattern": "a+"}, "pattern"),
        ({"items": {"type": "string", "maxLength": 3}}, "maxLength"),
        ({"type": "integer", "enum": [1, "a"]}, "a value of enum that is no integer"),
        ({"type": "integer", "enum": [1, True]}, "a value of enum that is no integer"),
        ({"type": "string", "const": 5}, "a value of const that is no string"),
        ({"type": "string", "anyOf": [{"type": "integer"}, {"type": "string"}]}, "anyOf beside type"),
        ({"type": "string", "$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, r"\$ref beside type"),
        ({"type": "object", "required": ["q"]}, "required names that properties lacks"),
        ({"anyOf": [{"minimum": 1}], "maximum": 3}, "anyOf beside maximum"),
    ],
)
def test_xgrammar_is_not_asked_for_what_it_would_ignore(xgrammar, schema, said):
    with pytest.raises(Refused, match=f"xgrammar does not keep to all of the JSON schema: {said}"):
        compiled(xgrammar, json=schema)


def test_a_property_may_have_the_name_of_a_keyword(xgrammar):
    compiled(xgrammar, json={"type": "object", "properties": {"not": {"type": "integer"}, "allOf": {"type": "string"}}})


def test_xgrammar_has_no_pattern_of_whitespace(xgrammar):
    with pytest.raises(Refused, match=r"no whitespace_pattern\. Set structured_outputs: \{backend: llguidance\}"):
        compiled(xgrammar, json=FLAT, whitespace_pattern=" ")


@pytest.mark.parametrize(
    "tag",
    [
        {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]},
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<f>",
                        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                        "end": "</f>",
                    }
                ],
            },
        },
    ],
)
def test_a_structural_tag_is_text_with_parts_that_have_a_form(backend, vocabulary, tag):
    grammar = compiled(backend, structural_tag=tag)
    token_of = {data: token_id for token_id, data in enumerate(vocabulary.tokens)}
    taken = [token_of[bytes([byte])] for byte in b"so <f>"]
    mask = np.zeros((1, vocabulary.mask_words), np.int32)
    assert not backend.fill([MaskWork(grammar.matcher(), taken, 0)], mask)
    following = {vocabulary.tokens[token_id][:1] for token_id in allowed_ids(mask[0])}
    assert following <= {bytes([byte]) for byte in b"-0123456789"}


def test_a_structural_tag_names_special_tokens_by_their_ids_and_its_text_has_none(backend, vocabulary):
    (mark,) = vocabulary.marks[-1:]
    token = {"type": "token", "token": mark}
    tag = {"type": "tag", "begin": token, "content": {"type": "any_text"}, "end": token}
    grammar = compiled(backend, structural_tag={"type": "structural_tag", "format": tag})
    matcher, found = grammar.matcher(), []
    for new in ([], [mark], [vocabulary.tokens.index(b"a")], [mark]):
        mask = np.zeros((1, vocabulary.mask_words), np.int32)
        assert not backend.fill([MaskWork(matcher, new, 0)], mask)
        found.append(allowed_ids(mask[0]))
    assert found[0] == {mark}
    assert found[1] & set(vocabulary.special_token_ids) == found[2] & set(vocabulary.special_token_ids) == {mark}
    assert len(found[1]) > 2000
    assert found[3] == set(vocabulary.eos_token_ids)


def test_a_structural_tag_without_its_parts_is_refused(backend):
    with pytest.raises(Refused, match=r"expected triggers, and structures of begin, schema and end; 'end' is missing"):
        compiled(backend, structural_tag={"structures": [{"begin": "a", "schema": {}}], "triggers": ["a"]})
    with pytest.raises(Refused, match="expected a format, which is an object"):
        compiled(backend, structural_tag={"type": "structural_tag"})


def _tag_of(content):
    return {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}


PLACES = {
    "alone": lambda content: content,
    "a tag": _tag_of,
    "a sequence": lambda content: {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, content]},
    "an alternative": lambda content: {"type": "or", "elements": [{"type": "const_string", "value": "a"}, content]},
    "an option": lambda content: {"type": "optional", "content": content},
    "repeats": lambda content: {"type": "repeat", "min": 1, "max": 2, "content": content},
    "triggered tags": lambda content: {"type": "triggered_tags", "triggers": ["<f"], "tags": [_tag_of(content)]},
    "separated tags": lambda content: {"type": "tags_with_separator", "tags": [_tag_of(content)], "separator": ","},
    "a dispatch": lambda content: {"type": "dispatch", "rules": [["<f", content]]},
    "a tag in a tag": lambda content: _tag_of({"type": "star", "content": _tag_of(content)}),
}
IGNORED = [
    (
        {"type": "json_schema", "json_schema": {"items": {"type": "integer", "multipleOf": 5}}},
        "JSON schema: multipleOf",
    ),
    ({"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}, "JSON schema: uniqueItems"),
    ({"type": "json_schema", "json_schema": {"type": "integer", "minimum": 10**20}}, r"minimum beyond 2\*\*53"),
    ({"type": "regex", "pattern": "a^b"}, r"ignores \^ within a regex"),
    ({"type": "grammar", "grammar": 'root ::= "a" (="b")'}, "look-ahead"),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("content", "said"), IGNORED)
def test_what_xgrammar_ignores_is_refused_wherever_a_structural_tag_has_it(xgrammar, place, content, said):
    with pytest.raises(Refused, match=said):
        compiled(xgrammar, structural_tag={"type": "structural_tag", "format": PLACES[place](content)})


@pytest.mark.parametrize(
    ("pattern", "said"), [("a$b", r"ignores \$"), (r"\Aab\Z", r"knows no \\A"), ("(a|^b)", r"ignores \^")]
)
def test_a_regex_with_what_xgrammar_leaves_out_is_refused(xgrammar, pattern, said):
    with pytest.raises(Refused, match=said):
        compiled(xgrammar, regex=pattern)


def test_the_dot_of_a_regex_takes_no_line_feed(backend, vocabulary):
    mask = np.zeros((1, vocabulary.mask_words), np.int32)
    for pattern in (".", "^a?.$", r"\\?."):
        assert not backend.fill([MaskWork(compiled(backend, regex=pattern).matcher(), [], 0)], mask)
        following = {
            vocabulary.tokens[token_id] for token_id in allowed_ids(mask[0]) if token_id < len(vocabulary.tokens)
        }
        assert b"b" in following and b"\n" not in following


class _Matcher:
    """Takes part in XGrammar's place; may block on an event, after it has told that the limit passes."""

    def __init__(self, blocks_on=None, limit_passes=lambda: None) -> None:
        self.blocks_on, self.limit_passes = blocks_on, limit_passes
        self.taken = []

    def accept_token(self, token_id):
        self.taken.append(token_id)
        return True

    def fill_next_token_bitmask(self, masks, index):
        self.limit_passes()
        if self.blocks_on is not None:
            self.blocks_on.wait(HANG_S)
        masks[index] = 5


_POLL_S = 0.01


@pytest.fixture
def limits(monkeypatch):
    """The limit of a matcher passes once for each release, whatever the clock says."""
    passed = threading.Semaphore(0)

    def wait_for(worker, num):
        while worker._num_done != num:
            if passed.acquire(blocking=False):
                return False
            worker._changed.wait(_POLL_S)
        return True

    monkeypatch.setattr(xgrammar_backend._Worker, "_wait_for", wait_for)
    monkeypatch.setattr(xgrammar_backend, "_MOST_MASK_S", HANG_S)
    return passed


def test_a_matcher_that_takes_too_long_is_left_behind_and_the_others_get_their_masks(vocabulary, limits):
    backend = make_backend("xgrammar", vocabulary, threads=1)
    gate = threading.Event()
    stuck = _Matcher(gate, lambda: limits.release(2))  # the first time another matcher was done meanwhile
    masks = np.zeros((3, vocabulary.mask_words), np.int32)
    work = [MaskWork(_Matcher(), [1], 2), MaskWork(stuck, [1], 0), MaskWork(_Matcher(), [1], 1)]
    faults = backend.fill(work, masks)
    assert list(faults) == [0]
    assert faults[0].startswith("xgrammar took more than")
    assert (masks[1:] == 5).all()
    gate.set()  # the thread that was left behind writes now, but to a memory of its own
    assert not backend.fill([MaskWork(_Matcher(), [1], 0)], masks)
    assert (masks[0] == 5).all()


def test_a_thread_that_was_left_behind_leaves_the_other_matchers_alone(vocabulary, limits):
    backend = make_backend("xgrammar", vocabulary, threads=1)
    gate, other = threading.Event(), _Matcher()
    stuck = _Matcher(gate, limits.release)
    before = set(threading.enumerate())
    masks = np.zeros((2, vocabulary.mask_words), np.int32)
    assert list(backend.fill([MaskWork(stuck, [1], 0), MaskWork(other, [7], 1)], masks)) == [0]
    left_behind = next(one for one in threading.enumerate() if one not in before)  # in the order of their start
    gate.set()
    left_behind.join(HANG_S)
    assert not left_behind.is_alive()
    assert other.taken == [7]


def test_after_a_few_that_took_too_long_xgrammar_is_asked_no_more(vocabulary, monkeypatch):
    backend = make_backend("xgrammar", vocabulary, threads=1)
    monkeypatch.setattr(xgrammar_backend, "_MOST_MASK_S", 0.05)
    gate = threading.Event()
    masks = np.zeros((6, vocabulary.mask_words), np.int32)
    faults = backend.fill([MaskWork(_Matcher(gate), [], row) for row in range(6)], masks)
    assert sorted(faults) == list(range(6))
    assert "is not asked any more. Restart the engine" in faults[5]
    gate.set()


def test_forms_of_json_become_schemas():
    assert Form.of(StructuredOutputsParams(json_object=True)) == Form("json", '{"type":"object"}')
    schema = {"properties": {"additionalProperties": {"properties": {}}, "b": {"additionalProperties": {}}}}
    form = Form.of(StructuredOutputsParams(json=schema, disable_additional_properties=True))
    assert json.loads(form.text) == {
        "properties": {
            "additionalProperties": {"properties": {}, "additionalProperties": False},
            "b": {"additionalProperties": {}},
        },
        "additionalProperties": False,
    }
