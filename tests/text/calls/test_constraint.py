"""The grammar of a forced call: what it allows is what the parser reads."""

import json
import random
import re

import pytest

from mllm_compile.errors import RequestError
from mllm_compile.text.calls.constraint import structural_tag
from mllm_compile.text.calls.syntax import Channels
from mllm_compile.text.calls.tools import ToolChoice, read_tools
from tests.text.calls.cases import NAMES, answer, call, named, read, syntax, tool

RECOGNISED = [name for name in NAMES if name != "PLAIN"]
TOOLS = [
    tool(
        "get_weather",
        ["city", "days"],
        city={"type": "string"},
        unit={"type": "string", "enum": ["C", "F"]},
        days={"type": "integer"},
        tags={"type": "array", "items": {"$ref": "#/$defs/tag"}},
    ),
    tool("now"),
    tool("note", text={"type": "string"}, exact={"type": "boolean"}),
]
TOOLS[0]["function"]["parameters"]["$defs"] = {"tag": {"type": "string"}}
STRICT = [{**one, "function": {**one["function"], "strict": True}} for one in TOOLS]
REQUIRED = ToolChoice("required")
NOTE, NOW = (ToolChoice("required", frozenset((name,)), is_single=True) for name in ("note", "now"))
MARK = re.compile(r"<[^<>\s=]+>|\[[A-Z_]+\]")  # texts that may be special tokens
VALUES = {"string": "a b", "integer": 3, "array": ["x"], "boolean": True, "object": {}}


def write(part, random):
    """One of the texts that a format allows, by the meaning that xgrammar's documentation gives its kinds."""
    kind = part["type"]
    if kind == "const_string":
        return part["value"]
    if kind == "token":
        return MARKS[part["token"]]
    if kind == "any_text":
        return "Some text."
    if kind == "regex":
        return {r"[ \n]{0,4}": "\n\n", "[0-9]{1,4}": "12", "[A-Za-z0-9]{9}": "abcdefghi"}[part["pattern"]]
    if kind == "json_schema":
        return json.dumps(value_of(part["json_schema"], random))
    if kind == "sequence":
        return "".join(write(one, random) for one in part["elements"])
    if kind == "or":
        return write(random.choice(part["elements"]), random)
    if kind == "optional":
        return write(part["content"], random) if random.random() < 0.5 else ""
    if kind == "tag":
        begin, end = (one if isinstance(one, str) else write(one, random) for one in (part["begin"], part["end"]))
        return begin + write(part["content"], random) + end
    if kind == "tags_with_separator":
        number = 1 if part["stop_after_first"] else random.randint(1, 3)
        return part["separator"].join(write(random.choice(part["tags"]), random) for _ in range(number))
    if kind == "token_triggered_tags":
        assert {tag["begin"]["token"] for tag in part["tags"]} == set(part["trigger_tokens"])
        return "Text. " + write(random.choice(part["tags"]), random)
    assert kind == "triggered_tags" and all(
        any(tag["begin"].startswith(trigger) for trigger in part["triggers"]) for tag in part["tags"]
    )
    return "Text. " + write(random.choice(part["tags"]), random)


def value_of(schema, random):
    if "enum" in schema:
        return random.choice(schema["enum"])
    if schema.get("type") != "object" or "properties" not in schema:
        return VALUES[schema["type"]]
    required = schema.get("required", ())
    return {
        key: value_of(inner, random)
        for key, inner in schema["properties"].items()
        if key in required or random.random() < 0.5
    }


def is_valid(name, arguments):
    schema = next(one["function"]["parameters"] for one in TOOLS if one["function"]["name"] == name)
    kinds = {key: type(VALUES[inner["type"]]) for key, inner in schema["properties"].items()}
    return set(schema["required"]) <= set(arguments) <= set(kinds) and all(
        isinstance(value, kinds[key]) for key, value in arguments.items()
    )


@pytest.mark.parametrize("name", RECOGNISED)
def test_what_a_forced_call_may_be_is_read_as_calls(name):
    tag = structural_tag(syntax(name), read_tools(TOOLS), REQUIRED)
    assert tag["type"] == "structural_tag" and json.dumps(tag)
    for seed in range(40):
        text = write(tag["format"], random.Random(seed))
        found = read(name, text, tools=TOOLS)
        assert found.calls and found.content == "", text
        assert all(found.ends) and all(is_valid(*one) for one in named(found)), text


@pytest.mark.parametrize("name", RECOGNISED)
def test_one_call_is_all_that_is_allowed_where_calls_are_not_parallel(name):
    tag = structural_tag(syntax(name), read_tools(TOOLS), REQUIRED, is_parallel=False)
    for seed in range(20):
        assert len(read(name, write(tag["format"], random.Random(seed)), tools=TOOLS).calls) == 1


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_named_tool_is_the_only_one(name):
    tag = structural_tag(syntax(name), read_tools(TOOLS), NOTE)
    for seed in range(10):
        found = read(name, write(tag["format"], random.Random(seed)), tools=TOOLS)
        assert [called for _, called, _ in found.calls] == ["note"], "once"


@pytest.mark.parametrize("name", RECOGNISED)
def test_of_allowed_tools_others_are_never_called(name):
    some = frozenset(("note", "now"))
    tags = [structural_tag(syntax(name), read_tools(TOOLS), ToolChoice("required", some))]
    if getattr(syntax(name).calls, "is_marked", True):
        tags.append(structural_tag(syntax(name), read_tools(TOOLS), ToolChoice("auto", some)))
    else:
        with pytest.raises(RequestError, match="allowed_tools is possible with mode 'required' only"):
            structural_tag(syntax(name), read_tools(TOOLS), ToolChoice("auto", some))
    for tag in tags:
        called = set()
        for seed in range(20):
            called |= {one for _, one, _ in read(name, write(tag["format"], random.Random(seed)), tools=TOOLS).calls}
        assert called == some
    every = frozenset(one["function"]["name"] for one in TOOLS)
    assert structural_tag(syntax(name), read_tools(TOOLS), ToolChoice("auto", every)) is None


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_forced_call_has_no_reasoning_where_thinking_is_switched_off(name):
    tag = structural_tag(syntax(name), read_tools(TOOLS), REQUIRED, may_reason=False)
    for seed in range(20):
        found = read(name, write(tag["format"], random.Random(seed)), tools=TOOLS)
        assert found.calls and not found.reasoning
    assert "any_text" not in json.dumps(structural_tag(syntax(name), read_tools([tool("now")]), NOW, may_reason=False))


@pytest.mark.parametrize("name", ["QWEN3", "MINIMAX_M2"])
def test_reasoning_comes_first_where_it_is_begun(name):
    tag = structural_tag(syntax(name), read_tools(TOOLS), REQUIRED, reasoning_is_open=True)
    text = write(tag["format"], random.Random(0))
    assert text.startswith("Some text.</think>")
    found = read(name, text, tools=TOOLS, reasoning_is_open=True)
    assert found.reasoning == "Some text." and found.calls and not found.content


def test_with_auto_only_strict_tools_are_held_to_their_schemas():
    assert structural_tag(syntax("QWEN3"), read_tools(TOOLS), ToolChoice("auto")) is None
    assert structural_tag(syntax("QWEN3"), read_tools(STRICT), ToolChoice("none")) is None
    some = [STRICT[0], TOOLS[1]]
    tag = structural_tag(syntax("QWEN3"), read_tools(some), ToolChoice("auto"))["format"]
    assert (tag["type"], tag["triggers"], tag["at_least_one"]) == ("triggered_tags", ["<tool_call>"], False)
    strict, free = tag["tags"]
    assert strict["content"]["json_schema"] == read_tools(TOOLS)[0].parameters
    assert free["content"]["json_schema"] == {"type": "object"}


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_strict_call_is_read_where_the_model_chose_it_or_refused_where_no_mark_tells_of_it(name):
    if not getattr(syntax(name).calls, "is_marked", True):
        with pytest.raises(RequestError, match="strict is possible with tool_choice 'required' or a named one only"):
            structural_tag(syntax(name), read_tools(STRICT), ToolChoice("auto"))
        return
    tag = structural_tag(syntax(name), read_tools(STRICT), ToolChoice("auto"))["format"]
    for seed in range(20):
        found = read(name, write(tag, random.Random(seed)), tools=TOOLS)
        assert found.calls and all(is_valid(*one) for one in named(found))
        assert found.content == "Text." or isinstance(syntax(name).calls, Channels)


MARKS: list[str] = []


def special_tokens(name):
    """Every text of a syntax that looks like a mark, as a special token."""
    found = syntax(name)
    texts = [*found.calls.literals(), *((found.reasoning.begin, found.reasoning.end) if found.reasoning else ())]
    MARKS[:] = dict.fromkeys(mark for text in texts for mark in MARK.findall(text))
    return {mark: token_id for token_id, mark in enumerate(MARKS)}


def texts_of(part):
    if isinstance(part, str):
        return [part]
    if isinstance(part, dict):
        part = [value for key, value in part.items() if key not in ("json_schema", "separator", "type")]
    return [text for one in part for text in texts_of(one)] if isinstance(part, list) else []


@pytest.mark.parametrize("name", RECOGNISED)
def test_marks_that_are_special_tokens_are_named_by_their_ids_and_the_texts_are_the_same(name):
    special = special_tokens(name)
    for tools, choice in ((TOOLS, REQUIRED), (STRICT, ToolChoice("auto"))):
        if choice.mode == "auto" and (isinstance(syntax(name).calls, Channels) or not syntax(name).calls.is_marked):
            continue
        plain = structural_tag(syntax(name), read_tools(tools), choice)["format"]
        by_ids = structural_tag(syntax(name), read_tools(tools), choice, special_tokens=special)["format"]
        spelled, named = (
            {mark for mark in special for text in texts_of(part) if mark in text} for part in (plain, by_ids)
        )
        assert not named
        assert (by_ids == plain) == (not spelled)
        for seed in range(20):
            assert write(by_ids, random.Random(seed)) == write(plain, random.Random(seed))


def test_a_mark_that_ends_an_answer_is_left_to_its_end_and_strict_channels_have_to_be_chosen():
    special = special_tokens("GPT_OSS")
    tag = structural_tag(syntax("GPT_OSS"), read_tools(TOOLS), REQUIRED, special_tokens=special | {"<|call|>": None})
    text = write(tag["format"], random.Random(0))
    assert "<|call|>" not in text and read("GPT_OSS", text, tools=TOOLS).calls
    with pytest.raises(RequestError, match="tools: strict is possible with tool_choice 'required' or a named one only"):
        structural_tag(syntax("GPT_OSS"), read_tools(STRICT), ToolChoice("auto"), special_tokens=special)


def test_what_a_model_s_syntax_does_not_allow_is_refused():
    said = (
        "tool_choice: 'required' needs a model whose calls can be told from its chat template; this one's cannot: the"
    )
    with pytest.raises(RequestError, match=re.escape(said)):
        structural_tag(syntax("PLAIN"), read_tools(TOOLS), REQUIRED)
    with pytest.raises(RequestError, match="tools: strict is possible with tool_choice 'required' or a named one only"):
        structural_tag(syntax("LLAMA31"), read_tools(STRICT), ToolChoice("auto"))


@pytest.mark.parametrize("name", RECOGNISED)
def test_xgrammar_takes_it_and_the_template_s_own_calls(name):
    """Where xgrammar is installed: the text of a call that the template writes fits the grammar."""
    xgrammar = pytest.importorskip("xgrammar")
    fits = pytest.importorskip("xgrammar.testing")._is_grammar_accept_string
    for tools, choice in ((TOOLS, REQUIRED), (TOOLS, NOW), (STRICT, ToolChoice("auto"))):
        if choice.mode == "auto" and not getattr(syntax(name).calls, "is_marked", True):
            continue
        grammar = xgrammar.Grammar.from_structural_tag(structural_tag(syntax(name), read_tools(tools), choice))
        for seed in range(5):
            tag = structural_tag(syntax(name), read_tools(tools), choice)["format"]
            assert fits(grammar, write(tag, random.Random(seed)))
    if name not in ("GPT_OSS", "GRANITE3", "PHI4_MINI", "OLMO3"):  # whose histories are written in another way
        grammar = xgrammar.Grammar.from_structural_tag(structural_tag(syntax(name), read_tools(TOOLS), REQUIRED))
        call_id = "functions.get_weather:0" if name == "KIMI_K2" else "abcdefghi"
        text = answer(name, [call("get_weather", {"city": "a", "days": 1}, call_id)])
        assert fits(grammar, text.rpartition("</think>")[2].strip())
