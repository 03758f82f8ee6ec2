"""Renders chat templates in processes that can be ended; they run template_server.py.

A process starts with the first chat, in about a twentieth of a second (process/helper_process.py). A template that does
not end, or eats memory, costs its own process and its own request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mllm_compile.errors import RequestError
from mllm_compile.process.helper_process import HelperProcesses, NoAnswer
from mllm_compile.text.template_protocol import (
    MAX_ANSWER,
    MAX_CHARACTERS,
    MAX_MEMORY,
    MAX_REQUEST,
    MAX_SECONDS,
    REFUSAL,
    TEXT,
    TOO_LONG,
    TOO_MUCH_MEMORY,
    VARIABLES_OF,
)

_MOST_PROCESSES = 4
_MAX_WAIT_S = 30
_MAX_START_S = 60
_ADVICE = "Shorten the messages, correct the model's chat template, or pass the prompt as text."


class TemplateProcesses(HelperProcesses):
    """Renders the templates of one model; from any thread, also after a fork.

    Args:
        sources: name → Jinja source.
        special_tokens: bos_token, eos_token, … as templates name them.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        super().__init__(
            "mllm_compile.text.template_server",
            json.dumps({"sources": dict(sources), "special_tokens": dict(special_tokens)}).encode(),
            task="that renders chat templates",
            seconds=MAX_SECONDS,
            max_wait_s=_MAX_WAIT_S,
            max_start_s=_MAX_START_S,
            max_answer=MAX_ANSWER,
            most=_MOST_PROCESSES,
            kept_after=(TEXT, REFUSAL),
        )

    def variables(self, name: str) -> frozenset[str]:
        """The names that the template `name` reads of what it is given.

        Raises:
            RequestError, MllmError: as from render.
        """
        return frozenset(json.loads(self.render({VARIABLES_OF: name})))

    def render(self, request: Mapping[str, Any]) -> str:
        """The prompt's text.

        Args:
            request: keyword arguments of `template_server.Templates.render`, plain JSON.

        Raises:
            RequestError: the template fails, refuses, or exceeds a limit; or the request is not plain JSON.
            MllmError: no process can be started.
        """
        try:
            body = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"chat messages, tools and variables must be plain JSON data (tools as JSON schemas): {error}."
            ) from None
        if len(body) > MAX_REQUEST:
            raise RequestError(
                f"the chat is {len(body)} bytes as JSON; expected at most {MAX_REQUEST}. Shorten the messages."
            )
        try:
            kind, answer = self.ask(body)
        except NoAnswer as none:
            end = f" for these messages, the most it may. {_ADVICE}" if none.is_limit else ". Ask again."
            raise RequestError(f"the model's chat template {none.why}{end}") from None
        text = answer.decode("utf-8", "surrogatepass")
        if kind == TEXT:
            return text
        limit = {
            TOO_MUCH_MEMORY: f"needs more than {MAX_MEMORY >> 20} MiB of memory for these messages",
            TOO_LONG: f"makes more than {MAX_CHARACTERS} characters of these messages",
        }.get(kind)
        raise RequestError(text if limit is None else f"the model's chat template {limit}, the most it may. {_ADVICE}")
