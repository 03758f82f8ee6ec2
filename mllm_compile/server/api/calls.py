"""Tool calls and reasoning of a chat: what a request asks for, and the format of answers that are read by a parser."""

from __future__ import annotations

import dataclasses
from typing import Any

from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.server.api.answers import ChatAnswers, event, usage_of
from mllm_compile.server.api.errors import bad_request
from mllm_compile.server.api.fields import ChatFields
from mllm_compile.server.api.prompts import tools_of
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.flow.choice import Choice
from mllm_compile.server.flow.job import Job
from mllm_compile.text.calls.constraint import structural_tag
from mllm_compile.text.calls.messages import chunk_deltas, whole_message
from mllm_compile.text.calls.parser import CallParser
from mllm_compile.text.calls.syntax import Channels


class AnswerReading:
    """How the answers of one chat are read.

    Args:
        prompt: its text.

    Attributes:
        is_needed: there may be calls, or reasoning.
        params: the sampling parameters with what this needs.

    Raises:
        RequestError, ApiError: the tools are malformed, or the model cannot be held to them.
    """

    def __init__(self, facts: EngineFacts, fields: ChatFields, prompt: str, params: SamplingParams) -> None:
        self._syntax = syntax = facts.syntax
        self._tools, choice = tools_of(fields.tools, fields.tool_choice)
        self._is_parallel = fields.parallel_tool_calls is not False and not choice.is_single
        self.is_needed = bool(self._tools) or syntax.reasoning is not None or isinstance(syntax.calls, Channels)
        form = params.structured_outputs
        if form is not None and self._tools:
            name = fields.form_field
            raise bad_request(f"{name}: expected none beside tools, as it is the form of all of the answer", name)
        is_open = syntax.reasoning is not None and syntax.reasoning.is_opened_by(prompt)
        # An answer with a form has it from its first token on.
        self._reasoning_is_open = is_open and form is None
        special = facts.special_tokens
        tag = structural_tag(
            syntax,
            self._tools,
            choice,
            is_parallel=self._is_parallel,
            reasoning_is_open=self._reasoning_is_open,
            may_reason=fields.may_reason() and not (syntax.reasoning and syntax.reasoning.is_closed_by(prompt)),
            special_tokens=facts.marks,
        )
        self._stripped: frozenset[str] = frozenset()
        changes: dict[str, Any] = {}
        if tag is not None:
            changes["structured_outputs"] = StructuredOutputsParams(structural_tag=tag)
        if self.is_needed and special.kept and params.skip_special_tokens:
            changes["skip_special_tokens"] = False
            self._stripped = special.stripped
        self.params = dataclasses.replace(params, **changes)

    def parser(self) -> CallParser:
        """A parser for one answer."""
        return CallParser(
            self._syntax,
            self._tools,
            reasoning_is_open=self._reasoning_is_open,
            is_parallel=self._is_parallel,
            stripped=self._stripped,
        )


class ReadChatAnswers(ChatAnswers):
    """The answers of /v1/chat/completions that a parser reads.

    Args:
        shows_reasoning: it is part of them.
    """

    def __init__(self, head: dict[str, Any], shows_reasoning: bool, **options: Any) -> None:
        super().__init__(head, **options)
        self._shows_reasoning = shows_reasoning

    def chunk(self, job: Job, choice: Choice) -> bytes:
        deltas = [delta for delta in chunk_deltas(choice.events) if self._shows_reasoning or "reasoning" not in delta]
        if not (deltas or choice.finish_reason or (choice.token_ids and self._tells_tokens)):
            return b""
        entries: list[dict[str, Any]] = [
            {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas or [{}]
        ]
        entries[0]["logprobs"] = self._logprobs(choice)
        if self._gives_ids:
            entries[0] |= self._ids(choice)
        entries[-1] |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        extra = {"usage": usage_of(job)} if self._usage_in_each else {}
        choice.sent()
        return b"".join(event(self._chunk_head | {"choices": [entry]} | extra) for entry in entries)

    def _answer(self, choice: Choice) -> dict[str, Any]:
        message, _ = whole_message(choice.events)
        if not self._shows_reasoning:
            for name in ("reasoning", "reasoning_content"):
                message.pop(name, None)
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        return {"message": message | {"refusal": None}, "logprobs": self._logprobs(choice)}
