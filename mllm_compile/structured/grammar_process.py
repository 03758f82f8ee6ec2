"""Tries forms of answers in processes that can be ended; they run grammar_server.py."""

from __future__ import annotations

import json
from dataclasses import asdict

from mllm_compile.errors import RequestError
from mllm_compile.process.helper_process import HelperProcesses, NoAnswer
from mllm_compile.structured.form import Form, Refused
from mllm_compile.structured.grammar_protocol import (
    GOOD,
    MAX_ANSWER,
    MAX_MASK_SECONDS,
    MAX_MEMORY,
    MAX_SECONDS,
    REFUSAL,
    TOO_MUCH_MEMORY,
)
from mllm_compile.structured.vocabulary import Vocabulary

_MOST_PROCESSES = 2
_MAX_WAIT_S = 30
_MAX_START_S = 60  # its backend imports torch
_ADVICE = "Simplify it: fewer alternatives, smaller repeats, less nesting."


class GrammarProcesses(HelperProcesses):
    """Tries forms with one backend, for one vocabulary; from any thread, also after a fork."""

    def __init__(self, backend: str, vocabulary: Vocabulary) -> None:
        super().__init__(
            "mllm_compile.structured.grammar_server",
            f"{backend}\n{MAX_MASK_SECONDS}\n{vocabulary.to_json()}".encode(),
            task="that tries grammars",
            seconds=MAX_SECONDS,
            max_wait_s=_MAX_WAIT_S,
            max_start_s=_MAX_START_S,
            max_answer=MAX_ANSWER,
            most=_MOST_PROCESSES,
            kept_after=(GOOD, REFUSAL),
        )

    def try_form(self, form: Form) -> None:
        """
        Raises:
            Refused: the backend refuses it.
            RequestError: it exceeds a limit, or ends the process.
            MllmError: no process can be started.
        """
        try:
            kind, answer = self.ask(json.dumps(asdict(form)).encode())
        except NoAnswer as none:
            raise _too_much(form, none.why) from None
        if kind == TOO_MUCH_MEMORY:
            raise _too_much(form, f"needs more than {MAX_MEMORY >> 20} MiB of memory")
        if kind == REFUSAL:
            raise Refused(answer.decode("utf-8", "replace"))


def _too_much(form: Form, why: str) -> RequestError:
    return RequestError(f"structured_outputs: compiling the {form.kind} {why}. {_ADVICE}")
