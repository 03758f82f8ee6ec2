"""/v1/messages, Anthropic's interface: the same chats under other names. Stateless; text alone."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from mllm_compile.server.api import prompts
from mllm_compile.server.api.answers import encode
from mllm_compile.server.api.errors import ApiError, bad_request
from mllm_compile.server.api.fields import CHATS_ALONE, ChatFields, Refused, params_of, read_fields
from mllm_compile.server.api.interfaces import Plan
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.flow.choice import Choice
from mllm_compile.server.flow.job import Job

_REFUSED: Refused = {
    "tools": (([],), CHATS_ALONE),
    "tool_choice": (({"type": "none"}, {"type": "auto"}), CHATS_ALONE),
    "thinking": (({"type": "disabled"},), CHATS_ALONE),
    "mcp_servers": (([],), "this server reaches nothing outside"),
    "container": ((), "code is not run"),
    "output_format": ((), "it has become output_config: {format: …}"),
}
_REASONS = {"length": "max_tokens", "stop": "end_turn"}
_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the answer."""

    format: Any = None


class _MessagesChat(ChatFields, kw_only=True):
    form_name = "output_config.format"


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
    # Taken, and without a meaning here.
    metadata: Any = None
    service_tier: Any = None


def refusal(error: ApiError) -> bytes:
    """The body of an error response."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return encode({"type": "error", "error": {"type": kind, "message": error.message}})


def read_chat(body: bytes) -> tuple[ChatFields, list[str]]:
    """A request as a chat, and the names in it that are unknown.

    Raises:
        ApiError: it is refused.
    """
    given, ignored = read_fields(MessagesFields, body, _REFUSED)
    system = [] if given.system is None else [{"role": "system", "content": _text(given.system, "system")}]
    messages = [{**message, "content": _text(message.get("content"), "messages")} for message in given.messages]
    goes_on = bool(messages) and messages[-1].get("role") == "assistant"
    fields = _MessagesChat(
        model=given.model,
        messages=[*system, *messages],
        continue_final_message=goes_on,
        max_tokens=given.max_tokens,
        stop=given.stop_sequences,
        stream=given.stream,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        response_format=None if given.output_config is None else given.output_config.format,
    )
    return fields, ignored


def _text(content: Any, field: str) -> str:
    """The text of a content: a text, or blocks of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(f"{field}: expected a text or a list of text blocks as content", field)
    other = next((block.get("type") for block in content if block.get("type") != "text"), None)
    if other is not None or not all(isinstance(block.get("text"), str) for block in content):
        raise bad_request(f"{field}: expected blocks of type text; only text is served", field)
    return "\n".join(block["text"] for block in content)


class MessagesRequest:
    """A request of /v1/messages."""

    prefix = "msg_"
    refusal = staticmethod(refusal)
    num_prompts = 1

    def __init__(self, body: bytes) -> None:
        self.fields, self.ignored = read_chat(body)
        if self.fields.max_tokens is None:
            raise bad_request("max_tokens: expected an integer of at least 1, got none")

    def plan(self, facts: EngineFacts) -> Plan:
        params = params_of(self.fields, facts.defaults)
        found = prompts.chat_prompts(facts, self.fields, params, prompts.chat_text(facts, self.fields))
        return Plan(found, params, MessagesAnswers)


class MessagesAnswers:
    """The answers of /v1/messages; they have one completion."""

    _BLOCK: ClassVar[dict[str, Any]] = {"type": "text", "text": ""}

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = {"id": head["id"], "type": "message", "role": "assistant", "model": head["model"]}

    def begin(self, job: Job) -> bytes:
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(job)}
        start = _event({"type": "message_start", "message": message})
        return start + _event({"type": "content_block_start", "index": 0, "content_block": self._BLOCK})

    def chunk(self, job: Job, choice: Choice) -> bytes:
        text = choice.text
        if not text:
            return b""
        choice.sent()
        return _event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})

    def tail(self, job: Job) -> bytes:
        return (
            _event({"type": "content_block_stop", "index": 0})
            + _event({"type": "message_delta", "delta": _end(job.choices[0]), "usage": _usage(job)})
            + _event({"type": "message_stop"})
        )

    def whole(self, job: Job) -> bytes:
        choice = job.choices[0]
        content = [{"type": "text", "text": choice.text}]
        return encode({**self._head, "content": content, **_end(choice), "usage": _usage(job)})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + refusal(error) + b"\n\n"

    def refusal(self, error: ApiError) -> bytes:
        return refusal(error)


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: ".encode() + encode(data) + b"\n\n"


def _end(choice: Choice) -> dict[str, Any]:
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": _REASONS.get(choice.finish_reason or "", choice.finish_reason), "stop_sequence": None}


def _usage(job: Job) -> dict[str, int]:
    cached = job.num_cached_tokens
    return {
        "input_tokens": job.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": job.num_output_tokens,
    }
