"""Chat messages to prompt text, by the Jinja template that comes with a model.

Behaves as Transformers' `apply_chat_template`, without importing it. Templates are foreign code. They run in Jinja's
immutable sandbox, see plain JSON data only, and are rendered in processes of their own, with limits on time and memory
(template_process.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mllm_compile.errors import RequestError
from mllm_compile.runtime.short_repr import typed_repr
from mllm_compile.text.template_process import TemplateProcesses

_EXPECTED = "{'role': …, 'content': …}"


def as_conversations(messages: Any) -> tuple[list[Any], bool]:
    """The conversations one by one, and whether one was given by itself, not in a list.

    The first entry decides; `check_messages` checks the conversations.

    Raises:
        RequestError: neither a list of messages nor a list of such lists.
    """
    if _is_list(messages):
        if not messages or isinstance(messages[0], Mapping):
            return [messages], True
        if _is_list(messages[0]):
            return list(messages), False
    raise RequestError(
        f"messages: expected a list of {_EXPECTED}, or a list of such lists, got {typed_repr(messages)}."
    )


def check_messages(messages: Any) -> None:
    """Refuses input that is no conversation, before a template renders it anyway.

    Raises:
        RequestError: no list, an empty one, a message without a role, or a user's without content.
    """
    if not _is_list(messages):
        raise RequestError(f"messages: expected a list of {_EXPECTED}, got {typed_repr(messages)}.")
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
        raise RequestError(f"messages: message {index} {fault}; expected {_EXPECTED}, got {typed_repr(message)}.")


class ChatTemplate:
    """The templates of one model.

    Args:
        templates: name → Jinja source. `default` is used, or `tool_use` when there are tools and such a template.
        special_tokens: bos_token, eos_token, … as templates name them.

    Attributes:
        source_for_tools: the source of the template that is rendered where there are tools.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._names = sorted(templates)
        self.source_for_tools = templates.get("tool_use") or templates.get("default") or ""
        self._processes = TemplateProcesses(templates, special_tokens)
        self._variables: dict[str, frozenset[str]] = {}  # by the template's name, once they were asked for

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text, special tokens written out.

        Args:
            messages: `{"role": …, "content": …}` each; keys whose value is None count as missing. A content may be a
                list of text parts: where the template takes a text they are its lines.
            tools: JSON schemas of functions that the model may call.
            documents: passed to the template.
            add_generation_prompt: end with the header of the assistant's answer; None: unless it goes on from the last
                message.
            continue_final_message: end with the last message's text, which the answer goes on from.
            variables: further names that the template knows, for example `enable_thinking=False`; any names, as a
                request's are.

        Raises:
            RequestError: no messages; one without a role or content; data that is not JSON; tools, documents or a
                variable that the template does not read; or a template that fails, refuses, or takes too much time or
                memory.
            MllmError: the system gives no process to render it in.
        """
        check_messages(messages)
        name = self._name(tools)
        goes_on = _is_true("continue_final_message", continue_final_message, False)
        begins = _is_true("add_generation_prompt", add_generation_prompt, not goes_on)
        if goes_on and begins:
            raise RequestError("continue_final_message: expected it without add_generation_prompt; the answer goes on.")
        return self._processes.render(
            {
                "name": name,
                "messages": messages,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": begins,
                "continue_final_message": goes_on,
                "variables": variables,
            }
        )

    def unread(self, names: Iterable[str], tools: Sequence[Any] | None) -> list[str]:
        """The names that the template would refuse, as it reads no such variable; sorted.

        Args:
            names: of variables.
            tools: as for `render`.

        Raises:
            RequestError, MllmError: as from render.
        """
        template = self._name(tools)
        if template not in self._variables:
            self._variables[template] = self._processes.variables(template)
        given = set(names) | ({"tools"} if tools and template != "tool_use" else set())
        return sorted(given - self._variables[template])

    def _name(self, tools: Sequence[Any] | None) -> str:
        name = "tool_use" if tools is not None and "tool_use" in self._names else "default"
        if name not in self._names:
            known = ", ".join(self._names) or "none"
            raise RequestError(f"the model has no default chat template (it has: {known}). Pass the prompt as text.")
        return name


def _is_true(name: str, given: Any, default: bool) -> bool:
    if given is None:
        return default
    if not isinstance(given, bool):
        raise RequestError(f"{name}: expected true or false, got {typed_repr(given)}.")
    return given


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
