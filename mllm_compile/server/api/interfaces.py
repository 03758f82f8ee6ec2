"""The two interfaces of OpenAI that generate: what their requests ask for, and the format of their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from mllm_compile.errors import RequestError
from mllm_compile.media.messages import has_media
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.transfer_params import KVTransferParams
from mllm_compile.server.api import prompts
from mllm_compile.server.api.answers import ChatAnswers, CompletionAnswers
from mllm_compile.server.api.calls import AnswerReading, ReadChatAnswers
from mllm_compile.server.api.errors import bad_request, openai_refusal
from mllm_compile.server.api.fields import (
    ChatFields,
    CompletionFields,
    GenerateFields,
    check_parts,
    params_of,
    read_fields,
)
from mllm_compile.server.api.logprobs import TokenTexts
from mllm_compile.server.api.prompts import Prompt
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.flow.choice import PromptRun
from mllm_compile.server.flow.job import JSON, AnswerFormat
from mllm_compile.server.flow.memory import bytes_of_json
from mllm_compile.server.flow.writer import Headers
from mllm_compile.text.calls.parser import CallParser

# Of a body that is planned where it is read: handing it to a thread, and getting it back, would take as long. To check
# ids holds the interpreter's lock wherever it runs; the tokenizer, which lets go of it, takes 0.4 ms for such a text.
_QUICK_TEXT_BYTES = 512
_QUICK_IDS_BYTES = 16 << 10
_TOKEN_BYTES = 40  # of an integer in a list


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerPlan:
    """A request that can be started.

    Attributes:
        format: makes the answer's format, from its id, time, model and fingerprint.
        is_only_echoed: generate nothing.
        make_parser: of the parser that reads an answer; None: it is its text.
        kept_bytes: of the request, that the answer needs beside prompts and parameters.
        has_text: the answer has a text, or its end depends on it.
        whole_headers: of an answer that is no stream.
        unread: fields that the model's chat template does not read.
    """

    prompts: list[Prompt]
    params: SamplingParams
    format: Callable[[dict[str, Any]], AnswerFormat]
    is_only_echoed: bool = False
    make_parser: Callable[[], CallParser] | None = None
    unread: tuple[str, ...] = ()
    kept_bytes: int = 0
    has_text: bool = True
    whole_headers: Headers = dataclasses.field(default_factory=lambda: JSON)

    @property
    def num_bytes(self) -> int:
        """The memory that it takes while it runs, at about the most."""
        prompts = sum(_TOKEN_BYTES * len(prompt.token_ids) + len(prompt.text or "") for prompt in self.prompts)
        return prompts + _size_of(self.params) + self.kept_bytes


class ApiRequest(Protocol):
    """A request that was read.

    Attributes:
        fields: its fields.
        ignored: names in it that nobody knows.
        num_prompts: how many prompts it has.
        is_quick: its plan takes about as long as handing it to a thread, and getting it back.
        has_media: its plan waits for a worker that prepares images.
    """

    ignored: list[str]

    @property
    def has_media(self) -> bool: ...

    @property
    def is_quick(self) -> bool: ...

    @property
    def fields(self) -> GenerateFields: ...

    @property
    def num_prompts(self) -> int: ...

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        """The plan of it for an engine; takes time, unless it is quick, as texts are tokenized.

        Raises:
            ApiError, MllmError: it is refused.
        """


class CompletionRequest:
    """A request of /v1/completions."""

    prefix = "cmpl-"
    refusal = staticmethod(openai_refusal)
    has_media = False

    def __init__(self, body: bytes) -> None:
        self.fields, self.ignored = read_fields(CompletionFields, body)
        self._items = prompts.prompt_items(self.fields.prompt)
        self.num_prompts = len(self._items)
        has_text = bool(self.fields.bad_words) or any(isinstance(item, str) for item in self._items)
        self.is_quick = len(body) <= (_QUICK_TEXT_BYTES if has_text else _QUICK_IDS_BYTES)
        _check_stream(self.fields)
        _check_transfer(self.fields, self.num_prompts)

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        fields = self.fields
        is_only_echoed = bool(fields.echo) and fields.most_tokens == 0
        if is_only_echoed:
            fields.max_tokens, fields.max_completion_tokens = 1, None  # an engine's prompt has an answer
        params = params_of(fields, facts.defaults)
        if fields.echo and params.logprobs is not None:
            params = dataclasses.replace(params, prompt_logprobs=params.logprobs)
        found = prompts.completion_prompts(facts, fields, self._items, params)
        echo_of = _echo_of(facts) if fields.echo else None

        def answers(head: dict[str, Any]) -> AnswerFormat:
            return CompletionAnswers(head, echo_of, **_options(fields, facts, params))

        return AnswerPlan(found, params, answers, is_only_echoed)


class ChatRequest:
    """A request of /v1/chat/completions."""

    prefix = "chatcmpl-"
    refusal = staticmethod(openai_refusal)
    num_prompts = 1
    is_quick = False  # templates are rendered by another process

    def __init__(self, body: bytes) -> None:
        self.fields, self.ignored = read_fields(ChatFields, body)
        if self.fields.top_logprobs is not None and not self.fields.logprobs:
            raise bad_request("top_logprobs: expected it with logprobs: true")
        check_parts("messages", self.fields.messages)
        self.has_media = has_media(self.fields.messages)
        _check_stream(self.fields)
        _check_transfer(self.fields, self.num_prompts)

    def plan(self, facts: EngineFacts) -> AnswerPlan:
        fields = self.fields
        params = params_of(fields, facts.defaults)
        options = _options(fields, facts, params)

        options["echo"] = prompts.last_answer(fields.messages) if fields.echo else ""

        def answers(head: dict[str, Any], is_read: bool) -> AnswerFormat:
            if not is_read:
                return ChatAnswers(head, **options)
            return ReadChatAnswers(head, fields.include_reasoning is not False, **options)

        return chat_plan(facts, fields, params, answers)


def chat_plan(
    facts: EngineFacts,
    fields: ChatFields,
    params: SamplingParams,
    answers: Callable[[dict[str, Any], bool], AnswerFormat],
) -> AnswerPlan:
    """The plan of a chat, whichever interface it came by.

    Args:
        answers: makes the answer's format, from its head, and whether a parser reads it.

    Raises:
        ApiError, MllmError: it is refused.
    """
    items = prompts.take_images(facts, fields)
    text, unread = prompts.chat_text(facts, fields) if fields.input_ids is None else prompts.given_text(facts, fields)
    reading = AnswerReading(facts, fields, text, params)
    found = prompts.chat_prompts(facts, fields, reading.params, text, items)
    return AnswerPlan(
        found,
        reading.params,
        lambda head: answers(head, reading.is_needed),
        make_parser=reading.parser if reading.is_needed else None,
        kept_bytes=0 if fields.tools is None else bytes_of_json(msgspec.json.encode(fields.tools)),
        unread=unread,
    )


def _size_of(params: SamplingParams) -> int:
    """The memory of those parameters that may be long."""
    form = params.structured_outputs
    return (0 if form is None else len(form.text)) + _TOKEN_BYTES * len(params.allowed_token_ids or ())


def _check_stream(fields: GenerateFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options: expected it with stream: true")
    if fields.stream and fields.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs: not in a stream. Use echo with logprobs, or stream: false")
    if fields.stream_interval is not None and fields.stream_interval < 1:
        raise bad_request(f"stream_interval: expected at least 1, got {fields.stream_interval}")


def _check_transfer(fields: GenerateFields, num_prompts: int) -> None:
    try:
        asked = KVTransferParams.of(fields.kv_transfer_params)
    except RequestError as error:
        raise bad_request(str(error), "kv_transfer_params") from None
    if asked is not None and num_prompts > 1:
        raise bad_request(f"kv_transfer_params: expected one prompt beside it, got {num_prompts}", "kv_transfer_params")
    if asked is not None and asked.do_remote_decode and fields.stream:
        raise bad_request("stream: expected false beside kv_transfer_params.do_remote_decode", "stream")


def _options(fields: GenerateFields, facts: EngineFacts, params: SamplingParams) -> dict[str, Any]:
    asked = fields.stream_options
    texts = TokenTexts(facts.tokenizer, as_ids=bool(fields.return_tokens_as_token_ids))
    return {
        "usage": asked is not None and bool(asked.include_usage),
        "usage_in_each": asked is not None and bool(asked.continuous_usage_stats),
        "texts": None if params.logprobs is None else texts,
        "prompt_texts": None if fields.prompt_logprobs is None else texts,
        # Without a tokenizer an answer has no text: its ids are all there is.
        "gives_versions": bool(fields.return_weight_versions),
        "gives_ids": facts.tokenizer is None if fields.return_token_ids is None else fields.return_token_ids,
    }


def _echo_of(facts: EngineFacts) -> Callable[[PromptRun], str]:
    def echo(prompt: PromptRun) -> str:
        if prompt.text is not None or facts.tokenizer is None:
            return prompt.text or ""
        return facts.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    return echo
