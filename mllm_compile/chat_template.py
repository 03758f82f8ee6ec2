"""Chat messages to prompt text, by the Jinja template that comes with a model.

Behaves as Transformers' `apply_chat_template` (the same names are defined, whitespace is handled alike), without
importing it. Templates are code from a stranger: they run in Jinja's immutable sandbox and see plain JSON data only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mllm_compile.errors import RequestError
from mllm_compile.runtime.shown import brief

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

# Names a message's reasoning goes by; templates read the first, gpt-oss's the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_EXPECTED = "{'role': …, 'content': …}"


def as_conversations(messages: Any) -> tuple[list[Any], bool]:
    """The conversations one by one, and whether it is a single one that was given, not in a list.

    What the first entry is decides; the conversations themselves are for `check_messages`.

    Raises:
        RequestError: neither a list of messages nor a list of such lists.
    """
    if _is_list(messages):
        if not messages or isinstance(messages[0], Mapping):
            return [messages], True
        if _is_list(messages[0]):
            return list(messages), False
    raise RequestError(f"messages: expected a list of {_EXPECTED}, or a list of such lists, got {brief(messages)}.")


def check_messages(messages: Any) -> None:
    """Refuses what is no conversation, before a template makes of it what it can.

    Raises:
        RequestError: no list, an empty one, a message without a role, or a user's without content.
    """
    if not _is_list(messages):
        raise RequestError(f"messages: expected a list of {_EXPECTED}, got {brief(messages)}.")
    if not messages:
        raise RequestError(f"the chat has no messages; expected at least one {_EXPECTED}.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            fault = "is no message"
        elif not isinstance(message.get("role"), str):
            fault = "has no role"
        elif message["role"] == "user" and message.get("content") is None:
            fault = "has no content"  # others may have none: tools, calls, responses, by names that templates give them
        else:
            continue
        raise RequestError(f"messages: message {index} {fault}; expected {_EXPECTED}, got {brief(message)}.")


@dataclass(frozen=True)
class _Compiled:
    """
    Attributes:
        variables: names that it reads of what it is given.
        takes_parts: it goes through the parts of a message's content itself.
    """

    template: Template
    variables: frozenset[str]
    takes_parts: bool


class ChatTemplate:
    """The templates of one model.

    Args:
        templates: name → Jinja source. `default` is used, or `tool_use` when there are tools and such a template.
        special_tokens: bos_token, eos_token, … as templates name them.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, _Compiled] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt's text, special tokens written out.

        Args:
            messages: `{"role": …, "content": …}` each; keys whose value is None count as missing. A content may be a
                list of text parts: where the template takes a text they are its lines.
            tools: JSON schemas of functions that the model may call.
            documents: passed to the template.
            add_generation_prompt: end with the header of the assistant's answer.
            variables: further names that the template knows, for example `enable_thinking=False`.

        Raises:
            RequestError: no messages, one without a role or content, data that is no JSON, tools, documents or a
                variable that the template does not read, or a template that fails or refuses.
        """
        check_messages(messages)
        from jinja2 import TemplateError

        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        compiled = self._template(name)
        given = set(variables)
        if tools and name != "tool_use":  # a template of that name is for tools, whatever it reads
            given.add("tools")
        if documents:
            given.add("documents")
        self._check_variables(compiled, given)
        plain = _as_json({"messages": messages, "tools": tools, "documents": documents, "variables": variables})
        contents = [_normalise(message, compiled.takes_parts) for message in plain["messages"]]
        try:
            return compiled.template.render(
                messages=contents,
                tools=plain["tools"],
                documents=plain["documents"],
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **plain["variables"]},
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as error:
            # What a template does with unexpected messages is up to its author: any of these is a refusal.
            raise RequestError(f"the model's chat template refuses these messages: {error}") from None

    def _template(self, name: str) -> _Compiled:
        from jinja2 import TemplateError

        if name not in self._sources:
            known = ", ".join(sorted(self._sources)) or "none"
            raise RequestError(f"the model has no default chat template (it has: {known}). Pass the prompt as text.")
        if name not in self._compiled:
            try:
                self._compiled[name] = _compile(self._environment, self._sources[name])
            except TemplateError as error:
                raise RequestError(f"the model's chat template is no valid Jinja template: {error}") from None
        return self._compiled[name]

    def _check_variables(self, compiled: _Compiled, variables: Set[str]) -> None:
        """What nobody reads would be ignored: a mistyped name, or what other libraries do beside the template."""
        unread = sorted(variables - compiled.variables)
        if unread:
            given = {"messages", "add_generation_prompt", *self._special_tokens}
            known = ", ".join(sorted(compiled.variables - given)) or "none"
            raise RequestError(
                f"{unread[0]}: the model's chat template reads no such variable; beside messages and "
                f"add_generation_prompt it may read: {known}."
            )

    @cached_property
    def _environment(self) -> Environment:
        return _make_environment()


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _compile(environment: Environment, source: str) -> _Compiled:
    from jinja2 import nodes
    from jinja2.meta import find_undeclared_variables

    tree = environment.parse(source)
    takes_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
    return _Compiled(environment.from_string(source), frozenset(find_undeclared_variables(tree)), takes_parts)


def _is_content(node: nodes.Node | None) -> bool:
    """Whether it is `message.content` or `message['content']`, filters behind it or not."""
    from jinja2 import nodes

    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _joined(content: list[Any]) -> str:
    """The texts of parts, `{"type": "text", "text": …}` as OpenAI's interface has them, a line each."""
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise RequestError(
                f"messages: a part of a content is {brief(part)}; expected {{'type': 'text', 'text': …}}, as this "
                "model's chat template takes texts alone."
            )
    return "\n".join(part["text"] for part in content)


def _normalise(message: dict[str, Any], takes_parts: bool) -> dict[str, Any]:
    message = {key: value for key, value in message.items() if value is not None}
    if isinstance(message.get("content"), list) and not takes_parts:
        message["content"] = _joined(message["content"])
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _as_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"chat messages, tools and variables must be plain JSON data (tools as JSON schemas): {error}."
        ) from None


def _make_environment() -> Environment:
    """Jinja as Transformers sets it up; heavy enough to be made only when a chat is rendered."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is just text."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own protocol

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which no model has seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
