"""The requests of /v1/responses, OpenAI's newer interface: stateless, as nothing is stored here."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import msgspec

from mllm_compile.media.messages import has_media
from mllm_compile.runtime.short_repr import typed_repr
from mllm_compile.server.api.errors import bad_request, openai_refusal
from mllm_compile.server.api.fields import ChatFields, check_parts, params_of, read_fields
from mllm_compile.server.api.foreign_fields import FOREIGN, OF_RESPONSES
from mllm_compile.server.api.interfaces import AnswerPlan, chat_plan
from mllm_compile.server.api.responses_answers import ResponsesAnswers
from mllm_compile.server.engine_facts import EngineFacts

_FOREIGN = {**FOREIGN, **OF_RESPONSES}
_TEXTS = ("input_text", "output_text", "text")
_IMAGE = "expected an input_image with image_url, data:image/png;base64,…"
_CHOICES = (
    "'none', 'auto', 'required', {'type': 'function', 'name': …} or {'type': 'allowed_tools', 'mode': …, 'tools': "
    "[{'type': 'function', 'name': …}, …]}"
)
_TOOL = "{'type': 'function', 'name': …, 'parameters': …}"


class ReasoningFields(msgspec.Struct, forbid_unknown_fields=True):
    """How much a model should think, where its template knows of it; reasoning is not summed up."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFields(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the text."""

    format: Any = None


class _ResponseChat(ChatFields, kw_only=True):
    form_name = "text.format"


class ResponseFields(msgspec.Struct, kw_only=True):
    """The fields of /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Any = None
    stream: bool | None = None
    temperature: Any = None
    top_p: Any = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None  # answers have it again
    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    path: ClassVar[str] = "/v1/responses"


class ResponsesRequest:
    """A request of /v1/responses."""

    prefix = "resp_"
    refusal = staticmethod(openai_refusal)
    num_prompts = 1
    is_quick = False

    def __init__(self, body: bytes) -> None:
        self._given, self.ignored = read_fields(ResponseFields, body, _FOREIGN)
        given = self._given
        if isinstance(given.input, list):
            check_parts("input", given.input)
        system = [] if given.instructions is None else [{"role": "system", "content": given.instructions}]
        reasoning = given.reasoning or ReasoningFields()
        self.ignored += [
            f"reasoning.{name}" for name in ("summary", "generate_summary") if getattr(reasoning, name) is not None
        ]
        self.fields = _ResponseChat(
            model=given.model,
            messages=[*system, *_messages(given.input)],
            max_tokens=given.max_output_tokens,
            stream=given.stream,
            temperature=given.temperature,
            top_p=given.top_p,
            reasoning_effort=reasoning.effort,
            response_format=None if given.text is None else given.text.format,
            tools=None if given.tools is None else [_tool(index, tool) for index, tool in enumerate(given.tools)],
            tool_choice=_tool_choice(given.tool_choice),
            parallel_tool_calls=given.parallel_tool_calls,
            session_id=given.session_id,
            prompt_cache_key=given.prompt_cache_key,
            prompt_cache_retention=given.prompt_cache_retention,
        )
        self.has_media = has_media(self.fields.messages)

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        params = params_of(self.fields, facts.defaults)
        given = self._given
        said = {
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata or {},
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "reasoning": {"effort": self.fields.reasoning_effort, "summary": None},
            "temperature": params.temperature,
            "text": {"format": self.fields.response_format or {"type": "text"}},
            "tool_choice": given.tool_choice or "auto",
            "tools": [{"strict": False, "parameters": None, **tool} for tool in given.tools or ()],
            "top_p": params.top_p,
        }
        # As JSON they take no more than the client has sent.
        repeated = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in said.items()}
        plan = chat_plan(facts, self.fields, params, lambda head, is_read: ResponsesAnswers(head, is_read, repeated))
        kept = plan.kept_bytes + sum(len(bytes(value)) for value in repeated.values())
        return dataclasses.replace(plan, kept_bytes=kept)


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as in a chat, where the function has a key of its own."""
    if tool.get("type") != "function":
        kind = typed_repr(tool.get("type"))
        raise bad_request(f"tools: tool {index} is {kind}; expected functions, {_TOOL}: others are not served")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    listed = choice.get("tools")
    if choice.get("type") == "allowed_tools" and isinstance(listed, list):
        named = [_named(one) for one in listed]
        if named and None not in named:
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    named_one = _named(choice)
    if named_one is None:
        raise bad_request(f"tool_choice: expected {_CHOICES}, got {typed_repr(choice)}")
    return named_one


def _named(choice: Any) -> dict[str, Any] | None:
    """The choice of a function as in a chat, or None for other choices."""
    is_function = isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str)
    return {"type": "function", "function": {"name": choice["name"]}} if is_function else None


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The input as chat messages; reasoning, text and calls of one answer become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # that further items are added to
    for item in given:
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": _content(item.get("content"), takes_images=role == "user")})
            answer = None
        elif kind == "function_call_output":
            messages.append(_result(item))
            answer = None
        elif kind in ("message", "reasoning", "function_call"):
            if answer is None or (kind != "function_call" and (answer["content"] or "tool_calls" in answer)):
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            _add(answer, kind, item)
        else:
            expected = "message, function_call, function_call_output or reasoning"
            raise bad_request(f"input: expected items of type {expected}, got {typed_repr(kind)}", "input")
    return messages


def _result(item: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(item.get("call_id"), str) or item.get("output") is None:
        raise bad_request("input: expected a function_call_output with call_id and output", "input")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"], takes_images=True)}


def _add(answer: dict[str, Any], kind: str, item: dict[str, Any]) -> None:
    """Adds an item to the assistant's message."""
    if kind == "message":
        answer["content"] = _content(item.get("content"), takes_images=False)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)
    else:
        parts = item.get("content") or []
        if not isinstance(parts, list) or not all(_is_part(part, ("reasoning_text",)) for part in parts):
            raise bad_request("input: expected reasoning_text as the content of reasoning", "input")
        if parts:
            answer["reasoning_content"] = "\n".join(part["text"] for part in parts)


def _content(content: Any, takes_images: bool) -> Any:
    """The content of a message: a text, or parts."""
    if not isinstance(content, list):
        return content
    return [_part(part, takes_images) for part in content]


def _part(part: Any, takes_images: bool) -> dict[str, Any]:
    """A part as in a chat."""
    if _is_part(part, _TEXTS):
        return {"type": "text", "text": part["text"]}
    if not isinstance(part, dict) or part.get("type") != "input_image" or not takes_images:
        expected = "parts of text or input_image" if takes_images else "parts of text"
        raise bad_request(f"input: expected {expected}, got {typed_repr(part)}", "input")
    if not isinstance(part.get("image_url"), str):
        raise bad_request(f"input: {_IMAGE}, got {typed_repr(part)}; files are not stored", "input")
    return {name: part[name] for name in ("type", "image_url", "detail") if part.get(name) is not None}


def _is_part(part: Any, kinds: tuple[str, ...]) -> bool:
    return isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)
