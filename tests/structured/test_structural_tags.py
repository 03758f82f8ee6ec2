"""Structural tags by both backends: the same texts, and schemas in them that are kept to."""

from __future__ import annotations

import json
import random

import pytest

from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.structured.backend import make_backend
from mllm_compile.structured.form import Form, Refused
from mllm_compile.structured.grammars import Grammars
from mllm_compile.structured.llguidance_backend import LlguidanceGrammar
from mllm_compile.structured.xgrammar_backend import XgrammarGrammar
from mllm_compile.text.calls.constraint import structural_tag
from mllm_compile.text.calls.tools import ToolChoice, read_tools
from tests.sample import slow_but_a_sample
from tests.structured.conftest import BACKENDS
from tests.structured.schema_judge import draw, is_right, takes, validator
from tests.text.calls.cases import named, read, syntax, tool
from tests.text.calls.test_constraint import NOW, RECOGNISED, REQUIRED, STRICT, TOOLS, write

FORMS = {
    "required": (TOOLS, REQUIRED, {}),
    "named": (TOOLS, NOW, {}),
    "one": (TOOLS, REQUIRED, {"is_parallel": False}),
    "strict": (STRICT, ToolChoice("auto"), {}),
    "allowed": (TOOLS, ToolChoice("auto", frozenset(("note", "now"))), {}),
    "open": (TOOLS, REQUIRED, {"reasoning_is_open": True}),
}
EACH = [
    (name, form)
    for name in RECOGNISED
    for form, (_, choice, how) in FORMS.items()
    if (choice.mode == "required" or getattr(syntax(name).calls, "is_marked", True))
    and (not how.get("reasoning_is_open") or syntax(name).reasoning)
]


@pytest.fixture(scope="module")
def backends(vocabulary):
    return {name: make_backend(name, vocabulary, threads=1) for name in BACKENDS}


def compiled(backend, form):
    tag = form if "format" in form or "structures" in form else {"type": "structural_tag", "format": form}
    return backend.compile(Form("structural_tag", json.dumps(tag)))


@pytest.mark.parametrize(("name", "form"), slow_but_a_sample(EACH, 6))
def test_both_backends_take_the_texts_of_a_form_of_calls(backends, name, form):
    tools, choice, how = FORMS[form]
    tag = structural_tag(syntax(name), read_tools(tools), choice, **how)
    grammars = {one: compiled(backends[one], tag) for one in BACKENDS}
    for seed in range(8):
        text = write(tag["format"], random.Random(seed))
        for one, grammar in grammars.items():
            assert takes(backends[one], grammar, text), (one, text)
            assert not takes(backends[one], grammar, text[:-1] + "\x01"), one


@pytest.mark.parametrize(("name", "form"), slow_but_a_sample(EACH, 4))
def test_what_llguidance_draws_of_a_form_of_calls_is_read_as_calls(backends, name, form):
    tools, choice, how = FORMS[form]
    tag = structural_tag(syntax(name), read_tools(tools), choice, **how)
    grammar = compiled(backends["llguidance"], tag)
    offered = choice.names or {one["function"]["name"] for one in TOOLS}
    for seed in range(6):
        answer = draw(backends["llguidance"], grammar, random.Random(seed), most_tokens=150)
        if answer is not None and _is_text(answer):
            is_open = how.get("reasoning_is_open", False)
            found = read(name, answer.decode(), tools=TOOLS, reasoning_is_open=is_open)
            assert found.calls or choice.mode == "auto", answer
            assert {called for _, called, _ in found.calls} <= offered and all(found.ends), answer


def _is_text(answer: bytes) -> bool:
    try:
        return bool(answer.decode())
    except UnicodeDecodeError:
        return False


ONLY_LLGUIDANCE = {
    "days": {"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 90},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "day": {"type": "string", "format": "date"},
    "nick": {"type": "string", "minLength": 2, "maxLength": 4},
    "size": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 4}]},
}


SYNTAXES = ["QWEN25", "QWEN3", "DEEPSEEK_V3", "GPT_OSS", "LLAMA31", "KIMI_K2"]


@pytest.mark.parametrize(
    ("name", "key"), slow_but_a_sample([(name, key) for name in SYNTAXES for key in ONLY_LLGUIDANCE], 4)
)
def test_a_required_call_keeps_to_keywords_that_one_backend_alone_knows(vocabulary, backends, name, key):
    tools = [tool("book", [key], **{key: ONLY_LLGUIDANCE[key]})]
    tools[0]["function"]["parameters"]["additionalProperties"] = False
    tag = structural_tag(syntax(name), read_tools(tools), REQUIRED, may_reason=False)
    with pytest.raises(Refused, match="xgrammar does not keep to all of the JSON schema"):
        compiled(backends["xgrammar"], tag)
    grammar = Grammars(lambda: vocabulary, BACKENDS, 1).compile(StructuredOutputsParams(structural_tag=tag))
    assert isinstance(grammar, LlguidanceGrammar)
    judge = validator(tools[0]["function"]["parameters"])
    made = []
    for seed in range(12):
        answer = draw(backends["llguidance"], grammar, random.Random(seed), 150)
        if answer is not None and _is_text(answer):
            made += [arguments for _, arguments in named(read(name, answer.decode(), tools=tools))]
    assert made
    assert all(is_right(judge, json.dumps(arguments).encode()) for arguments in made), made


def test_what_llguidance_does_not_know_of_tags_xgrammar_is_asked_for(vocabulary, backends):
    content = {"type": "json_schema", "json_schema": {"type": "boolean"}}
    form = {"type": "repeat", "min": 2, "max": 2, "content": content}
    with pytest.raises(Refused, match="llguidance takes no repeat in a structural tag"):
        compiled(backends["llguidance"], form)
    tag = {"type": "structural_tag", "format": form}
    grammar = Grammars(lambda: vocabulary, BACKENDS, 1).compile(StructuredOutputsParams(structural_tag=tag))
    assert isinstance(grammar, XgrammarGrammar)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"type": "any_text", "max_tokens": 5}, "takes no max_tokens of any_text"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "takes no style of json_schema"),
        ({"type": "token", "token": "<eos>"}, "tokens by their ids alone"),
        ({"type": "tag", "begin": "a"}, "not of the form that XGrammar's documentation has"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "regex", "pattern": "a"}]}, "neither a text"),
    ],
)
def test_what_llguidance_cannot_hold_an_answer_to_is_refused(backends, form, said):
    with pytest.raises(Refused, match=said):
        compiled(backends["llguidance"], form)


TEXT, ONE = {"type": "any_text"}, {"type": "json_schema", "json_schema": {"const": 1}}
AB = {"type": "const_string", "value": "ab"}
FREE = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [
        {
            "type": "tag",
            "begin": "<f=a>",
            "content": {"type": "json_schema", "json_schema": {"const": 1}},
            "end": "</f>",
        }
    ],
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (FREE, ["", "a", "x <f=a>1</f>", "<f=a>1</f> y <f=a>1</f>", "a < b"], ["<f", "<f=b>1</f>", "x <f=a>2</f>"]),
        ({**FREE, "at_least_one": True}, ["<f=a>1</f>"], ["", "x"]),
        ({**FREE, "stop_after_first": True}, ["x<f=a>1</f>"], ["<f=a>1</f> y"]),
        ({"type": "tag", "begin": "<", "content": TEXT, "end": ">"}, ["<>", "<a\n>"], ["<", "<a>b>", "a"]),
        (
            {"type": "sequence", "elements": [TEXT, {"type": "const_string", "value": "ab"}]},
            ["ab", "aab"],
            ["abc", "a"],
        ),
        (
            {"type": "optional", "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}}},
            ["", "1", "2"],
            ["3", "11"],
        ),
    ],
)
def test_both_backends_mean_the_same_by_a_tag(backends, name, form, right, wrong):
    grammar = compiled(backends[name], form)
    assert [text for text in right if not takes(backends[name], grammar, text)] == []
    assert [text for text in wrong if takes(backends[name], grammar, text)] == []
