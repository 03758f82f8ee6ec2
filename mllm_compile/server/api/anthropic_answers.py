"""The answers of /v1/messages: blocks of thinking, text and tool_use; and its errors."""

from __future__ import annotations

from typing import Any

import msgspec

from mllm_compile.server.api.answers import encode
from mllm_compile.server.api.blocks import Block, Blocks, Change, Kind
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.flow.choice import Choice
from mllm_compile.server.flow.job import Job
from mllm_compile.text.calls.values import INVALID_JSON

_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


def refusal(error: ApiError) -> bytes:
    """The body of an error response."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return encode({"type": "error", "error": {"type": kind, "message": error.message}})


class MessagesAnswers:
    """The answers of /v1/messages; they have one completion.

    Args:
        is_read: a parser reads it.
        shows_thinking: reasoning is in it.
    """

    def __init__(self, head: dict[str, Any], is_read: bool, shows_thinking: bool) -> None:
        self._head = {"id": head["id"], "type": "message", "role": "assistant", "model": head["model"]}
        self._blocks = Blocks(is_read, shows_thinking)

    def begin(self, job: Job) -> bytes:
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(job)}
        return _event({"type": "message_start", "message": message})

    def chunk(self, job: Job, choice: Choice) -> bytes:
        events = b"".join(_told(*change) for change in self._blocks.news(choice))
        choice.sent()
        return events

    def tail(self, job: Job) -> bytes:
        choice = job.choices[0]
        return (
            b"".join(_told(*change) for change in self._blocks.end(choice))
            + _event({"type": "message_delta", "delta": _end(choice), "usage": _usage(job)})
            + _event({"type": "message_stop"})
        )

    def whole(self, job: Job) -> bytes:
        choice = job.choices[0]
        content = [_block(block) for block in self._blocks.whole(choice)]
        return encode({**self._head, "content": content, **_end(choice), "usage": _usage(job)})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + refusal(error) + b"\n\n"

    def refusal(self, error: ApiError) -> bytes:
        return refusal(error)


def _told(change: Change, block: Block, text: str) -> bytes:
    """The events of what happens to a block."""
    if change is Change.BEGINS:
        return _event({"type": "content_block_start", "index": block.index, "content_block": _block(block)})
    if change is Change.GROWS:
        return _delta(block, _DELTAS[block.kind], text)
    signed = _delta(block, ("signature_delta", "signature"), "") if block.kind is Kind.REASONING else b""
    return signed + _event({"type": "content_block_stop", "index": block.index})


_DELTAS = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


def _delta(block: Block, names: tuple[str, str], text: str) -> bytes:
    delta = {"type": names[0], names[1]: text}
    return _event({"type": "content_block_delta", "index": block.index, "delta": delta})


def _block(block: Block) -> dict[str, Any]:
    """A block as it is by now; it begins empty."""
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": block.text}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    assert block.call is not None, "of a call"
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    if not arguments.strip():
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


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
