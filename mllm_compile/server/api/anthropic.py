"""The requests of /v1/messages, Anthropic's interface: the same chats under other names. Stateless."""

from __future__ import annotations

import itertools
import json
from typing import Any, ClassVar, TypeGuard

import msgspec

from mllm_compile.media.messages import has_media
from mllm_compile.runtime.short_repr import typed_repr
from mllm_compile.server.api.anthropic_answers import MessagesAnswers, refusal
from mllm_compile.server.api.errors import bad_request
from mllm_compile.server.api.fields import ChatFields, check_parts, params_of, read_fields
from mllm_compile.server.api.foreign_fields import FOREIGN, OF_MESSAGES
from mllm_compile.server.api.interfaces import AnswerPlan, chat_plan
from mllm_compile.server.engine_facts import EngineFacts

_FOREIGN = {**FOREIGN, **OF_MESSAGES}
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_TTLS = ("5m", "1h")  # the longest last
_TOOL = "{'name': …, 'input_schema': …}"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Inputs always stream as they are made.
_TOOL_FIELDS = {"name", "description", "input_schema", "strict", "type", "cache_control", "eager_input_streaming"}


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the answer."""

    format: Any = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """The wish for reasoning in the answer; `budget_tokens` is not held to."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class _MessagesChat(ChatFields, kw_only=True):
    form_name = "output_config.format"

    thinks: bool = True

    def may_reason(self) -> bool:
        return self.thinks and super().may_reason()


class MessagesFields(msgspec.Struct, kw_only=True):
    """The fields of /v1/messages."""

    messages: list[dict[str, Any]]
    max_tokens: Any = None  # /count_tokens has none
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Any = None
    stream: bool | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    output_config: OutputConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None
    session_id: str | None = None  # ours, as is the next one
    chat_template_kwargs: dict[str, Any] | None = None  # a model's own switches, such as enable_thinking

    path: ClassVar[str] = "/v1/messages"


def read_chat(body: bytes) -> tuple[ChatFields, list[str]]:
    """A request as a chat, and the names in it that are unknown, or are not held to.

    Raises:
        ApiError: it is refused.
    """
    given, ignored = read_fields(MessagesFields, body, _FOREIGN)
    check_parts("messages", given.messages)
    system = [] if given.system is None else [{"role": "system", "content": _text(given.system, "system")}]
    messages = [one for message in given.messages for one in _chat_messages(message)]
    choice, is_parallel = _tool_choice(given.tool_choice)
    if given.thinking is not None and given.thinking.budget_tokens is not None:
        ignored.append("thinking.budget_tokens")
    fields = _MessagesChat(
        model=given.model,
        messages=[*system, *messages],
        continue_final_message=_goes_on(messages),
        max_tokens=given.max_tokens,
        stop=given.stop_sequences,
        stream=given.stream,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        response_format=None if given.output_config is None else given.output_config.format,
        tools=None if given.tools is None else [_tool(index, tool) for index, tool in enumerate(given.tools)],
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        include_reasoning=_shows_thinking(given.thinking),
        session_id=given.session_id,
        prompt_cache_retention=_retention(given),
        thinks=given.thinking is None or given.thinking.type != "disabled",
        chat_template_kwargs=given.chat_template_kwargs,
    )
    return fields, ignored


def _shows_thinking(thinking: Thinking | None) -> bool:
    """Anthropic's answers begin with thinking only where it is asked for: clients take the first block as the text."""
    if thinking is None:
        return False
    if thinking.type not in ("enabled", "adaptive", "disabled"):
        raise bad_request(f"thinking: expected a type of enabled, adaptive or disabled, got {thinking.type[:40]!r}")
    if thinking.display not in (None, "summarized", "omitted"):
        raise bad_request(f"thinking: expected display to be summarized or omitted, got {thinking.display[:40]!r}")
    return thinking.type != "disabled" and thinking.display != "omitted"


def _retention(given: MessagesFields) -> str | None:
    """The longest time that a cache_control asks for, of the request, of tools and of blocks; None: there is no such.

    Raises:
        ApiError: one of them is of another form.
    """
    contents = [given.system, *(message.get("content") for message in given.messages)]
    blocks = [block for content in contents if _is_blocks(content) for block in content]
    holders = [{"cache_control": given.cache_control}, *(given.tools or ()), *blocks]
    asked = [found for holder in holders if (found := holder.get("cache_control")) is not None]
    for control in asked:
        is_known = (
            isinstance(control, dict) and control.get("type") == "ephemeral" and control.keys() <= {"type", "ttl"}
        )
        if not is_known or control.get("ttl", "5m") not in _TTLS:
            expected = f"{{'type': 'ephemeral'}}, with a ttl of {' or '.join(_TTLS)}"
            raise bad_request(f"cache_control: expected {expected}, got {typed_repr(control)}", "cache_control")
    return max((control.get("ttl", "5m") for control in asked), key=_TTLS.index, default=None)


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI's function."""
    where = f"tools: tool {index}"
    if tool.get("type", "custom") not in ("custom", None):
        raise bad_request(
            f"{where} is {typed_repr(tool['type'])}; tools of the server's own are not served. Offer yours"
        )
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise bad_request(f"{where}: expected {_TOOL}, got {typed_repr(tool)}")
    unknown = next((name for name in tool if name not in _TOOL_FIELDS), None)
    if unknown is not None:
        raise bad_request(f"{where} ({tool['name'][:40]}): {unknown[:40]} is not served; expected {_TOOL}")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(choice: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """OpenAI's tool_choice and parallel_tool_calls."""
    if choice is None:
        return None, None
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and isinstance(name, str):
        how: Any = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        how = _CHOICES[kind]
    else:
        expected = "{'type': 'auto'}, 'any' or 'none', or {'type': 'tool', 'name': …}"
        raise bad_request(f"tool_choice: expected {expected}, got {typed_repr(choice)}")
    is_single = choice.get("disable_parallel_tool_use", False)
    if not isinstance(is_single, bool):
        raise bad_request("tool_choice: expected disable_parallel_tool_use to be true or false")
    return how, not is_single


def _goes_on(messages: list[dict[str, Any]]) -> bool:
    """True if the answer goes on from the last message."""
    if not messages or messages[-1].get("role") != "assistant":
        return False
    if messages[-1].get("tool_calls"):
        raise bad_request("messages: the last one has tool_use; expected its tool_result in a message of the user's")
    return True


def _chat_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message as chat messages: there, results of tools are messages of their own."""
    content, role = message.get("content"), message.get("role")
    blocks: list[dict[str, Any]] = content if _is_blocks(content) else []
    if role == "assistant" and any(block.get("type") != "text" for block in blocks):
        return [_assistant(blocks)]
    if role != "user" or not any(block.get("type") == "tool_result" for block in blocks):
        return [{**message, "content": _content(content) if role == "user" else _text(content, "messages")}]
    messages: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        if not isinstance(block.get("tool_use_id"), str):
            raise bad_request("messages: a tool_result has no tool_use_id; expected the id of a tool_use")
        result = _content(block.get("content") or "")
        messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
    return [*messages, {"role": "user", "content": _content(texts)}] if texts else messages


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """A message of the assistant's with calls or thinking."""
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call(block))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        else:
            texts.append(block)
    message: dict[str, Any] = {"role": "assistant", "content": _text(texts, "messages")}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(block.get("id"), str) or not isinstance(block.get("input"), dict):
        raise bad_request(f"messages: expected a tool_use with id, name and input, an object, got {typed_repr(block)}")
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {"id": block["id"], "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


def _is_blocks(content: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(content, list) and all(isinstance(block, dict) for block in content)


def _text(content: Any, field: str) -> str:
    """The text of a content: a text, or blocks of text."""
    if isinstance(content, str):
        return content
    if not _is_blocks(content):
        raise bad_request(f"{field}: expected a text or a list of text blocks as content", field)
    other = next((block.get("type") for block in content if block.get("type") != "text"), None)
    if other is not None or not all(isinstance(block.get("text"), str) for block in content):
        raise bad_request(f"{field}: expected blocks of type text, got {typed_repr(other)}", field)
    return "\n".join(block["text"] for block in content)


def _content(content: Any) -> Any:
    """The content of a message of the user's, or of a tool's result: a text, or parts with images."""
    if not _is_blocks(content) or not any(block.get("type") == "image" for block in content):
        return _text(content, "messages")
    parts: list[dict[str, Any]] = []
    for is_image, group in itertools.groupby(content, lambda block: block.get("type") == "image"):
        blocks = list(group)
        parts += map(_image, blocks) if is_image else [{"type": "text", "text": _text(blocks, "messages")}]
    return parts


def _image(block: dict[str, Any]) -> dict[str, Any]:
    """An image as the part of a chat."""
    source = block.get("source")
    given = source if isinstance(source, dict) else {}
    kind, data, media_type = (given.get(name) for name in ("type", "data", "media_type"))
    if kind == "url" and isinstance(given.get("url"), str):
        return {"type": "image_url", "image_url": {"url": given["url"]}}  # an address is refused by its name
    if kind != "base64" or not isinstance(data, str) or media_type not in _IMAGES:
        expected = f"{{'type': 'base64', 'media_type': one of {', '.join(_IMAGES)}, 'data': …}}"
        raise bad_request(
            f"messages: expected the source of an image to be {expected}, got {typed_repr(source)}", "messages"
        )
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}


class MessagesRequest:
    """A request of /v1/messages."""

    prefix = "msg_"
    refusal = staticmethod(refusal)
    num_prompts = 1
    is_quick = False

    def __init__(self, body: bytes) -> None:
        self.fields, self.ignored = read_chat(body)
        if self.fields.max_tokens is None:
            raise bad_request("max_tokens: expected an integer of at least 1, got none")
        self.has_media = has_media(self.fields.messages)

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        params = params_of(self.fields, facts.defaults)
        shows_thinking = self.fields.include_reasoning is True
        return chat_plan(
            facts, self.fields, params, lambda head, is_read: MessagesAnswers(head, is_read, shows_thinking)
        )
