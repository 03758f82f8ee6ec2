"""The process that renders a model's chat templates; template_process.py starts it and talks to it.

Templates are code from a stranger. Jinja's sandbox keeps them from reaching anything, and the kernel makes them end.
This process has a limit on its memory, each request a limit on its processor time. A template that exceeds one is
killed here, even in the middle of 10**(10**9). This process knows only the templates and the messages.

Behaves as Transformers' `apply_chat_template` (the same names are defined, whitespace is handled alike).
process/helper_server.py has the protocol, template_protocol.py its words.
"""

from __future__ import annotations

import json
import resource
import secrets
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mllm_compile.process.helper_server import limit_files_and, serve
from mllm_compile.runtime.short_repr import short_repr, typed_repr
from mllm_compile.text.template_protocol import (
    MAX_CHARACTERS,
    MAX_MEMORY,
    REFUSAL,
    TEXT,
    TOO_LONG,
    TOO_MUCH_MEMORY,
    VARIABLES_OF,
)

_MAX_REASON = 1000  # characters
_MAX_NAME = 60
# vLLM's arguments of a chat that are no variables of a template.
_OF_VLLM = {
    "chat_template_kwargs": " Give its entries as arguments of their own.",
    "use_tqdm": " Did you mean progress?",
}

# Names a message's reasoning goes by; templates read the first, gpt-oss's the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class Refused(Exception):
    """The reason why there is no prompt, in words for the caller."""


class TooLong(Exception):
    """The prompt has more than MAX_CHARACTERS."""


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


class Templates:
    """The templates of one model.

    Args:
        sources: name → Jinja source.
        special_tokens: bos_token, eos_token, … as templates name them.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._special_tokens = special_tokens
        self._environment = _make_environment()
        self._compiled: dict[str, _Compiled] = {}

    def render(
        self,
        name: str,
        *,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        documents: list[Any] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
    ) -> str:
        """The prompt's text; arguments as `ChatTemplate.render` takes them, plain JSON.

        Raises:
            Refused: the template fails, refuses, or does not read what is given.
            TooLong: the text is longer than a prompt may be.
        """
        compiled = self._template(name)
        given = set(variables)
        if tools and name != "tool_use":  # a template of that name is for tools, whatever it reads
            given.add("tools")
        if documents:
            given.add("documents")
        self._check_variables(compiled, given)
        end = _EndMark(messages) if continue_final_message else None
        given_messages = [_normalise(message, compiled.takes_parts) for message in messages]
        names = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        text = self._generate(compiled, given_messages, {**self._special_tokens, **variables, **names})
        return text if end is None else end.text_before(text)

    def _generate(self, compiled: _Compiled, messages: list[dict[str, Any]], names: dict[str, Any]) -> str:
        parts: list[str] = []
        length = 0
        try:
            for part in compiled.template.generate(messages=messages, **names):
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise TooLong
                parts.append(part)
        except (Refused, TooLong, MemoryError):
            raise
        except Exception as error:
            # A template's author decides about unexpected messages: any error is a refusal.
            raise Refused(f"the model's chat template refuses these messages: {_reason(error)}") from None
        return "".join(parts)

    def variables(self, name: str) -> list[str]:
        """The names that a template reads of what it is given, sorted.

        Raises:
            Refused: it is no valid template.
        """
        return sorted(self._template(name).variables)

    def _template(self, name: str) -> _Compiled:
        if name not in self._compiled:
            try:
                self._compiled[name] = _compile(self._environment, self._sources[name])
            except MemoryError:
                raise
            except Exception as error:  # Jinja's own, or Python's at what Jinja has made of it
                raise Refused(f"the model's chat template is no valid Jinja template: {_reason(error)}") from None
        return self._compiled[name]

    def _check_variables(self, compiled: _Compiled, variables: Set[str]) -> None:
        """Refuses variables that the template would ignore: a mistyped name, or an option of other libraries."""
        unread = sorted(variables - compiled.variables)
        if unread:
            given = {"messages", "add_generation_prompt", *self._special_tokens}
            known = _cut(", ".join(sorted(compiled.variables - given)))
            name = unread[0] if unread[0].isidentifier() and len(unread[0]) <= _MAX_NAME else short_repr(unread[0])
            others = f"; beside messages and add_generation_prompt it may read: {known}" if known else ", only messages"
            raise Refused(f"{name}: the model's chat template reads no such variable{others}.{_OF_VLLM.get(name, '')}")


class _EndMark:
    """A mark behind the text that the answer goes on from; it is put there before the template renders.

    Its place in the prompt is the end of that text, whatever the text is, and whatever the template adds behind it. The
    mark is random, so no text of a client's has it. As in Transformers a space follows it: where the template has cut
    that space off, it cuts spaces off all texts, and those before the mark go too.

    Args:
        messages: the chat; the last one gets the mark.

    Raises:
        Refused: the last message has no text to go on from.
    """

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._mark = f"END_{secrets.token_hex(16)}"
        last = messages[-1]
        if last.get("tool_calls"):
            raise Refused("continue_final_message: the last message has tool_calls; expected one that is a text.")
        content = last.get("content")
        if isinstance(content, str):
            self._text = content
            last["content"] = self._marked(content)
            return
        parts = content if isinstance(content, list) else []
        texts = [part for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if not texts:
            raise Refused("continue_final_message: expected a last message whose content is a text, or has one.")
        self._text = texts[-1]["text"]
        texts[-1]["text"] = self._marked(self._text)

    def _marked(self, text: str) -> str:
        return f"{text}{self._mark} "

    def text_before(self, prompt: str) -> str:
        """The prompt up to the end of the message's text.

        Raises:
            Refused: the template has left the text out, or changed it.
        """
        before, mark, behind = prompt.rpartition(self._mark)
        before = before.replace(f"{self._mark} ", "").replace(self._mark, "")  # of a text that is written twice
        if not behind.startswith(" "):
            before = before.rstrip()
        if not mark or not before.rstrip().endswith(self._text.strip()):
            raise Refused("continue_final_message: the model's chat template does not repeat the last message as it is")
        return before


def _reason(error: Exception) -> str:
    """One line that any log takes: what a template says, or Python of its values, may have many, and surrogates."""
    line = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
    return _cut(line) or type(error).__name__


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}…"


def _compile(environment: Environment, source: str) -> _Compiled:
    tree = environment.parse(source)
    takes_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
    return _Compiled(environment.from_string(source), frozenset(find_undeclared_variables(tree)), takes_parts)


def _is_content(node: nodes.Node | None) -> bool:
    """True for `message.content` or `message['content']`, filters behind it or not."""
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _joined(content: list[Any]) -> str:
    """The texts of parts, `{"type": "text", "text": …}` as OpenAI's interface has them, a line each."""
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise Refused(
                f"messages: a part of a content is {typed_repr(part)}; expected {{'type': 'text', 'text': …}}, as this "
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


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own protocol

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _make_environment() -> Environment:
    """Jinja's environment as Transformers sets it up."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
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
    """Writes JSON without Jinja's escapes of HTML characters, which no model has seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# --- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answers requests until the pipe of requests ends."""
    limit_files_and(resource.RLIMIT_AS, MAX_MEMORY)

    def open_with(first: bytes) -> Callable[[bytes], tuple[bytes, bytes]]:
        templates = Templates(**json.loads(first))
        return lambda request: _answer(templates, request)

    serve(open_with)


def _answer(templates: Templates, request: bytes) -> tuple[bytes, bytes]:
    try:
        asked = _parsed(request)
        name = asked.get(VARIABLES_OF)
        text = templates.render(**asked) if name is None else json.dumps(templates.variables(name))
        return TEXT, text.encode("utf-8", "surrogatepass")
    except Refused as refusal:
        return REFUSAL, str(refusal).encode()
    except TooLong:
        return TOO_LONG, b""
    except MemoryError:
        return TOO_MUCH_MEMORY, b""


def _parsed(request: bytes) -> dict[str, Any]:
    """A caller that has raised Python's own limits writes JSON that this process does not read.

    Raises:
        Refused: it is nested too deep, or has an integer of too many digits.
    """
    try:
        asked: dict[str, Any] = json.loads(request)
        return asked
    except (ValueError, RecursionError) as error:
        raise Refused(f"chat messages, tools and variables must be plain JSON data: {_reason(error)}.") from None
