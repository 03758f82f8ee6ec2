"""Tools in requests."""

import re

import pytest

from mllm_compile.errors import RequestError
from mllm_compile.text.calls.tools import NO_PARAMETERS, ToolChoice, read_tool_choice, read_tools
from tests.text.calls.cases import TOOLS, tool


def function(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ({}, "tools: expected a list of {'type': 'function', 'function': {'name': …, 'parameters': …}}, got dict {}."),
        ("f", "tools: expected a list of "),
        (["f"], "tools: tool 0: expected {'type'"),
        ([{"type": "custom"}], "tools: tool 0: type is 'custom'; expected 'function', the only type there is."),
        ([{"name": "f"}], "tools: tool 0: type is None; expected 'function'"),
        ([{"type": "function", "name": "f"}], "tools: tool 0: expected {'type'"),
        ([function(name="a b")], "tools: tool 0: name is 'a b'; expected 1 to 128 letters, digits or any of '_', '-'"),
        ([function(name="a" * 129)], "tools: tool 0: name is 'aaa"),
        ([function(name=3)], "tools: tool 0: name is 3; expected"),
        ([function(description=3)], "tools: tool 0 (f): description is int 3; expected a text."),
        ([function(strict="yes")], "tools: tool 0 (f): strict is str 'yes'; expected true or false."),
        ([function(params={})], "tools: tool 0 (f): 'params' is no field of a function; expected description, name, p"),
        ([function(parameters=[])], "tools: tool 0 (f): parameters are list []; expected the JSON schema of an object"),
        ([function(parameters={"type": "string"})], "tools: tool 0 (f): parameters are dict {'type': 'string'}; expec"),
        ([function(parameters={"properties": []})], "tools: tool 0 (f): properties are list []; expected schemas by n"),
        ([function(), function()], "tools: tool 1 has the name of tool 0, 'f'. Rename one."),
        ([function()] * 513, "tools: 513 of them; expected at most 512. Offer fewer."),
        ([function(description="a" * (1 << 20))], r"tools: 10486\d\d bytes as JSON; expected at most 1048576. Offer"),
        ([function(parameters=nested(64))], "tools: nested deeper than 64 levels. Flatten the parameters' schemas."),
        ([function(parameters={"properties": {"a": float("nan")}})], "tools: expected plain JSON data: "),
        ([function(parameters={"properties": {"a": b""}})], "tools: expected plain JSON data: "),
    ],
)
def test_malformed_tools_are_refused(tools, said):
    with pytest.raises(RequestError, match=said if "\\d" in said else "^" + re.escape(said)):
        read_tools(tools)


def test_tools_that_refer_to_themselves_are_refused():
    loop = {"type": "object"}
    loop["properties"] = {"a": loop}
    with pytest.raises(RequestError, match="tools: nested deeper than 64 levels"):
        read_tools([function(parameters=loop)])


def test_tools_are_made_ready_for_templates():
    assert read_tools(None) == read_tools([]) == ()
    bare, full = read_tools([function(strict=True, description="D"), tool("g", ["a"], a={"type": "string"})])
    assert (bare.name, bare.parameters, bare.is_strict) == ("f", NO_PARAMETERS, True)
    assert bare.definition == function(description="D", parameters=NO_PARAMETERS)
    assert full.definition == tool("g", ["a"], a={"type": "string"}) and not full.is_strict


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("value", "tools", "expected"),
    [
        (None, TOOLS, ToolChoice("auto")),
        (None, [], ToolChoice("none")),
        ("auto", [], ToolChoice("none")),
        ("none", TOOLS, ToolChoice("none")),
        ("required", TOOLS, ToolChoice("required")),
        (
            {"type": "function", "function": {"name": "now"}},
            TOOLS,
            ToolChoice("required", frozenset({"now"}), is_single=True),
        ),
        (allowed("auto", "now"), TOOLS, ToolChoice("auto", frozenset({"now"}))),
        (allowed("required", "now", "get_weather"), TOOLS, ToolChoice("required", frozenset({"now", "get_weather"}))),
    ],
)
def test_a_choice_is_read(value, tools, expected):
    assert read_tool_choice(value, read_tools(tools)) == expected


@pytest.mark.parametrize(
    ("value", "tools", "said"),
    [
        ("required", [], "tool_choice: 'required' without tools. Offer at least one in tools."),
        ("any", TOOLS, "tool_choice: expected 'none', 'auto', 'required', {'type': 'function', 'function': {'name"),
        ({"type": "allowed_tools"}, TOOLS, "tool_choice: expected {'type': 'allowed_tools', 'allowed_tools': {'mode'"),
        (allowed("any", "now"), TOOLS, "tool_choice: expected {'type': 'allowed_tools'"),
        (allowed("auto"), TOOLS, "tool_choice: expected {'type': 'allowed_tools'"),
        (allowed("auto", "f"), TOOLS, "tool_choice: 'f' is not among the tools: 'get_weat"),
        (allowed("auto", 5), TOOLS, "tool_choice: expected {'type': 'allowed_tools'"),
        ({"type": "function", "function": {"name": []}}, TOOLS, "tool_choice: expected 'none'"),
        ({"type": "function", "function": {"name": "f"}}, TOOLS, "tool_choice: 'f' is not among the tools: 'get_weat"),
        ({"type": "function", "function": {"name": "f"}}, [], "tool_choice: 'f' is not among the tools: none. Offer"),
    ],
)
def test_a_malformed_choice_is_refused(value, tools, said):
    with pytest.raises(RequestError, match="^" + re.escape(said)):
        read_tool_choice(value, read_tools(tools))
