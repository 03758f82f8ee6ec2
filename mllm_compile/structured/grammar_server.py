"""The process that tries grammars before the engine's has them; grammar_process.py starts it and talks to it.

Schemas and regular expressions are a stranger's, and libraries that compile them have been seen to run for minutes, to
eat gigabytes and to overflow their stack. So all that the engine's process will do with one is done here first, within
limits: it is compiled, and a few answers are drawn from it at random, mask after mask. Its stack is smaller than any
of the engine's threads has.
"""

from __future__ import annotations

import json
import random
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mllm_compile.process.helper_server import Answer, limit_files_and, serve
from mllm_compile.runtime.sampling.grammar import Grammar, MaskWork
from mllm_compile.structured.backend import Backend, make_backend
from mllm_compile.structured.form import Form, Refused
from mllm_compile.structured.grammar_protocol import GOOD, MAX_MEMORY, REFUSAL, TOO_MUCH_MEMORY
from mllm_compile.structured.vocabulary import Vocabulary

_STACK_BYTES = 1 << 20
_NUM_ANSWERS, _MOST_TOKENS = 3, 40


def main() -> None:
    """Answers requests until the pipe of requests ends."""
    serve(_open)


def _open(first: bytes) -> Callable[[bytes], Answer]:
    name, mask_seconds, vocabulary = first.decode().split("\n", 2)
    trials = Trials(make_backend(name, Vocabulary.from_json(vocabulary), threads=1), float(mask_seconds))
    # Memory of the imports so far does not count: with XGrammar that is torch.
    limit_files_and(resource.RLIMIT_DATA, _data_bytes() + MAX_MEMORY)
    threading.stack_size(_STACK_BYTES)
    return trials.answer


def _data_bytes() -> int:
    """The memory that this process may write to so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), 0)


class Trials:
    """Tries forms with one backend.

    Args:
        mask_seconds: of processor time that the next tokens of an answer may take.
    """

    def __init__(self, backend: Backend, mask_seconds: float) -> None:
        self._backend, self._mask_seconds = backend, mask_seconds

    def answer(self, request: bytes) -> Answer:
        """The outcome of a form, which is JSON; on a thread of its own, for its stack."""
        outcome: list[Answer] = []
        thread = threading.Thread(target=lambda: outcome.append(self._outcome(request)))
        thread.start()
        thread.join()
        return outcome[0]

    def _outcome(self, request: bytes) -> Answer:
        try:
            self.run(Form(**json.loads(request)))
        except Refused as refusal:
            return REFUSAL, str(refusal).encode("utf-8", "backslashreplace")
        except MemoryError:
            return TOO_MUCH_MEMORY, b""
        return GOOD, b""

    def run(self, form: Form) -> None:
        """
        Raises:
            Refused: the backend refuses it, or no answer has this form, or its masks take too long.
        """
        grammar = self._backend.compile(form)
        chance = random.Random(0)
        for _ in range(_NUM_ANSWERS):
            self._draw_answer(grammar, chance)

    def _draw_answer(self, grammar: Grammar, chance: random.Random) -> None:
        vocabulary, matcher = self._backend.vocabulary, grammar.matcher()
        taken: list[int] = []
        for count in range(_MOST_TOKENS):
            mask = np.zeros((1, vocabulary.mask_words), np.int32)
            begun = time.process_time()
            faults = self._backend.fill([MaskWork(matcher, taken, 0)], mask)
            if time.process_time() - begun > self._mask_seconds:
                raise Refused(f"the tokens that may follow take more than {self._mask_seconds:g} s to find")
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))
            if count == 0 and (faults or not allowed.size):
                raise Refused(faults.get(0, "no answer has this form"))
            # Later an answer that leads nowhere is a model's to avoid.
            if faults or not allowed.size:
                return
            token_id = int(chance.choice(allowed))
            if token_id in vocabulary.eos_token_ids:
                return
            taken = [token_id]
