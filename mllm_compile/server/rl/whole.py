"""Answers that come whole: the parts of AnswerPlan's encoders that only streams have, and errors."""

from __future__ import annotations

from mllm_compile.server.api.errors import ApiError, openai_refusal
from mllm_compile.server.flow.choice import Choice
from mllm_compile.server.flow.job import Job


class WholeAnswers:
    """The base of answers to requests that refuse `stream`."""

    def begin(self, job: Job) -> bytes:
        raise RuntimeError("internal error: such an answer is no stream")

    def chunk(self, job: Job, choice: Choice) -> bytes:
        raise RuntimeError("internal error: such an answer is no stream")

    def tail(self, job: Job) -> bytes:
        raise RuntimeError("internal error: such an answer is no stream")

    def failure(self, error: ApiError) -> bytes:
        return error.body

    def refusal(self, error: ApiError) -> bytes:
        return openai_refusal(error)
