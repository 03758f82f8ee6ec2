"""/v1/responses, OpenAI's newer interface: stateless, as nothing is stored here. Text alone."""

from __future__ import annotations

from typing import Any

import msgspec

from mllm_compile.server.api import prompts
from mllm_compile.server.api.answers import encode
from mllm_compile.server.api.errors import ApiError, bad_request, openai_refusal
from mllm_compile.server.api.fields import CHATS_ALONE, ChatFields, Refused, params_of, read_fields
from mllm_compile.server.api.interfaces import Plan
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.flow.choice import Choice
from mllm_compile.server.flow.job import Job

_STATE = "nothing is stored between requests. Send the whole conversation as input"
_REFUSED: Refused = {
    "tools": (([],), CHATS_ALONE),
    "tool_choice": (("none", "auto"), CHATS_ALONE),
    "previous_response_id": ((), _STATE),
    "conversation": ((), _STATE),
    "background": ((False,), _STATE),
    "prompt": ((), "there are no stored prompts"),
    "include": (([],), "there is nothing else that an answer could include"),
    "truncation": (("disabled",), "an input is not shortened"),
    "max_tool_calls": ((), CHATS_ALONE),
}
_TEXTS = ("input_text", "output_text", "text")


class ReasoningFields(msgspec.Struct):
    """How much a model should think, where its template knows of it."""

    effort: str | None = None


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
    # Taken, and without a meaning here: `store` too, as answers say store: false.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None


class ResponsesRequest:
    """A request of /v1/responses."""

    prefix = "resp_"
    refusal = staticmethod(openai_refusal)
    num_prompts = 1

    def __init__(self, body: bytes) -> None:
        self._given, self.ignored = read_fields(ResponseFields, body, _REFUSED)
        given = self._given
        system = [] if given.instructions is None else [{"role": "system", "content": given.instructions}]
        self.fields = _ResponseChat(
            model=given.model,
            messages=[*system, *_messages(given.input)],
            max_tokens=given.max_output_tokens,
            stream=given.stream,
            temperature=given.temperature,
            top_p=given.top_p,
            reasoning_effort=None if given.reasoning is None else given.reasoning.effort,
            response_format=None if given.text is None else given.text.format,
        )

    def plan(self, facts: EngineFacts) -> Plan:
        params = params_of(self.fields, facts.defaults)
        found = prompts.chat_prompts(facts, self.fields, params, prompts.chat_text(facts, self.fields))
        said = {
            "instructions": self._given.instructions,
            "max_output_tokens": self._given.max_output_tokens,
            "metadata": self._given.metadata or {},
            "temperature": params.temperature,
            "text": {"format": self.fields.response_format or {"type": "text"}},
            "top_p": params.top_p,
        }
        return Plan(found, params, lambda head: ResponsesAnswers(head, said))


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The input as chat messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = []
    for item in given:
        if item.get("type", "message") != "message":
            raise bad_request(f"input: expected items of type message, got {str(item.get('type'))[:40]}", "input")
        content = item.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") in _TEXTS for part in content):
                raise bad_request("input: expected parts of text; only text is served", "input")
            content = [{"type": "text", "text": part.get("text")} for part in content]
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": content})
    return messages


class ResponsesAnswers:
    """The answers of /v1/responses; they have one completion.

    Args:
        said: what the request has said of itself, which the answer repeats.
    """

    def __init__(self, head: dict[str, Any], said: dict[str, Any]) -> None:
        self._item_id = "msg_" + head["id"].removeprefix(ResponsesRequest.prefix)
        self._response = {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
            "error": None,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            **said,
        }
        self._texts: list[str] = []
        self._number = 0

    def begin(self, job: Job) -> bytes:
        response = self._response | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress", None)),
                self._event("response.content_part.added", **self._place(), part=_part("")),
            )
        )

    def chunk(self, job: Job, choice: Choice) -> bytes:
        text = choice.text
        if not text:
            return b""
        self._texts.append(text)
        choice.sent()
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def tail(self, job: Job) -> bytes:
        text = "".join(self._texts)
        response = self._ended(job, text)
        return b"".join(
            (
                self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
                self._event("response.content_part.done", **self._place(), part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=response["output"][0]),
                self._event(f"response.{response['status']}", response=response),
            )
        )

    def whole(self, job: Job) -> bytes:
        return encode(self._ended(job, job.choices[0].text))

    def failure(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def refusal(self, error: ApiError) -> bytes:
        return openai_refusal(error)

    def _ended(self, job: Job, text: str) -> dict[str, Any]:
        is_cut = job.choices[0].finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        return self._response | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(status, text)],
            "usage": {
                "input_tokens": job.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": job.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": job.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": job.num_prompt_tokens + job.num_output_tokens,
            },
        }

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return f"event: {kind}\ndata: ".encode() + encode({"type": kind, **data, "sequence_number": number}) + b"\n\n"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
