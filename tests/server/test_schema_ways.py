"""A schema that cannot be held to is refused by the keyword's name, by whichever way it comes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.server.api.anthropic import read_chat
from mllm_compile.server.api.calls import AnswerReading
from mllm_compile.server.api.fields import ChatFields, params_of, read_fields
from mllm_compile.server.api.responses import ResponsesRequest
from mllm_compile.structured.grammars import Grammars
from mllm_compile.text.calls.syntax import SpecialTokens
from tests.structured.conftest import BACKENDS, make_vocabulary
from tests.text.calls.cases import syntax

IGNORED = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}},
    "required": ["a"],
}
ROUNDED = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 10**20}}, "required": ["a"]}


def tag_of(schema: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}


def function(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **fields}}


NAMED = {"type": "function", "function": {"name": "f"}}
CHATS = {
    "json_schema": lambda s: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}},
    "structural_tag": lambda s: {"response_format": tag_of(s)},
    "structured_outputs": lambda s: {"structured_outputs": {"json": s}},
    "guided_json": lambda s: {"guided_json": s},
    "required": lambda s: {"tools": [function(s)], "tool_choice": "required"},
    "named": lambda s: {"tools": [function(s)], "tool_choice": NAMED},
    "strict": lambda s: {"tools": [function(s, strict=True)]},
}
RESPONSES = {
    "text.format": lambda s: {"text": {"format": {"type": "json_schema", "name": "x", "schema": s}}},
    "tools": lambda s: {
        "tools": [{"type": "function", "name": "f", "parameters": s}],
        "tool_choice": {"type": "function", "name": "f"},
    },
}
MESSAGES = {
    "output_config": lambda s: {"output_config": {"format": {"type": "json_schema", "schema": s}}},
    "any": lambda s: {"tools": [{"name": "f", "input_schema": s}], "tool_choice": {"type": "any"}},
    "tool": lambda s: {"tools": [{"name": "f", "input_schema": s}], "tool_choice": {"type": "tool", "name": "f"}},
    "strict": lambda s: {"tools": [{"name": "f", "input_schema": s, "strict": True}]},
}
CHAT = [{"role": "user", "content": "x"}]
WAYS = {
    **{
        f"chat {name}": (lambda body: read_fields(ChatFields, body)[0], {"messages": CHAT}, CHATS[name])
        for name in CHATS
    },
    **{
        f"responses {name}": (lambda body: ResponsesRequest(body).fields, {"input": "x"}, RESPONSES[name])
        for name in RESPONSES
    },
    **{
        f"messages {name}": (lambda body: read_chat(body)[0], {"messages": CHAT, "max_tokens": 9}, MESSAGES[name])
        for name in MESSAGES
    },
}


@pytest.fixture(scope="module")
def grammars():
    vocabulary = make_vocabulary()
    return Grammars(lambda: vocabulary, BACKENDS, 1)


@pytest.mark.parametrize(("schema", "said"), [(IGNORED, "uniqueItems"), (ROUNDED, r"minimum beyond 2\*\*53")])
@pytest.mark.parametrize("way", WAYS)
def test_a_schema_that_cannot_be_held_to_is_refused_by_its_keyword(grammars, way, schema, said):
    read, head, asks = WAYS[way]
    fields = read(json.dumps({**head, **asks(schema)}).encode())
    special = SpecialTokens(frozenset(), frozenset())
    facts: Any = SimpleNamespace(syntax=syntax("QWEN3"), special_tokens=special, marks={})
    params = AnswerReading(facts, fields, "", params_of(fields, SamplingParams())).params
    with pytest.raises(RequestError, match=said):
        grammars.compile(params.structured_outputs)


@pytest.mark.parametrize("how", [{"json": IGNORED}, {"json": json.dumps(ROUNDED)}, {"structural_tag": tag_of(IGNORED)}])
def test_so_it_is_in_python(grammars, how):
    with pytest.raises(RequestError, match=r"uniqueItems|minimum beyond 2\*\*53"):
        grammars.compile(StructuredOutputsParams(**how))
