"""Compiles the forms that requests ask for: tried in a process that can be ended, then compiled here, and kept.

Nothing is imported or prepared before the first request that asks. Runs on callers' threads, never on the engine's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.grammar import Grammar
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.structured.backend import Backend, check_installed, make_backend
from mllm_compile.structured.form import Form, Refused
from mllm_compile.structured.grammar_process import GrammarProcesses
from mllm_compile.structured.timestamps import TimesGrammar
from mllm_compile.structured.vocabulary import Vocabulary

_MOST_KEPT = 64  # compiled forms, the last that were asked for
# Errors after which another backend may take the text; other errors are the text's.
_DIFFERING = ("json", "grammar", "structural_tag")


class Grammars:
    """Compiles forms for one model; thread-safe.

    Args:
        read_vocabulary: called with the first form.
        backends: names, in the order of use.
        threads: that make masks.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary], backends: Sequence[str], threads: int) -> None:
        self._read_vocabulary = read_vocabulary
        self._names = backends
        self._threads = threads
        self._preparing = threading.Lock()  # of these two, while libraries are imported and read the vocabulary
        self._vocabulary: Vocabulary | None = None
        self._parts: dict[str, tuple[GrammarProcesses, Backend]] = {}
        self._lock = threading.Lock()  # of these two
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._compiling: dict[bytes, threading.Lock] = {}

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a form; those asked for last are kept.

        Raises:
            RequestError: all backends refuse it, or it exceeds a limit.
            ConfigError: no backend is installed.
            MllmError: the tokenizer is of a kind whose tokens have no bytes of their own, or no process can be started.
        """
        with self._lock:
            grammar = self._take(params.key)
            if grammar is not None:
                return grammar
            turn = self._compiling.setdefault(params.key, threading.Lock())
        with turn:  # another request for the same grammar waits for it
            with self._lock:
                grammar = self._take(params.key)
            if grammar is None:
                try:
                    grammar = self._compile(Form.of(params))
                finally:
                    with self._lock:
                        self._compiling.pop(params.key, None)
                with self._lock:
                    self._kept[params.key] = grammar
                    if len(self._kept) > _MOST_KEPT:
                        self._kept.popitem(last=False)
        return grammar

    def _take(self, key: bytes) -> Grammar | None:
        grammar = self._kept.get(key)
        if grammar is not None:
            self._kept.move_to_end(key)
        return grammar

    def _compile(self, form: Form) -> Grammar:
        if form.kind == "timestamps":
            return self._times(int(form.text))
        names = check_installed(self._names)
        reasons = []
        for name in names:
            processes, backend = self._parts_of(name)
            try:
                processes.try_form(form)
                return backend.compile(form)
            except Refused as refusal:
                reason = str(refusal).rstrip(". ")
                reasons.append(reason if len(names) == 1 else f"{name}: {reason}")
            if form.kind not in _DIFFERING:
                break
        raise RequestError(f"structured_outputs: {form.kind} is refused: {'; '.join(reasons)}.")

    def _times(self, no_timestamps: int) -> Grammar:
        """The one grammar of times that a model has: a step has one first time for all its requests."""
        with self._preparing:
            vocabulary = self._known_vocabulary()
        if no_timestamps != vocabulary.no_timestamps:
            own = vocabulary.no_timestamps
            expected = "the model's tokenizer has no <|notimestamps|>" if own is None else f"expected {own}"
            raise RequestError(f"structured_outputs: timestamps: {expected}, got {no_timestamps}. Leave it out.")
        try:
            return TimesGrammar(no_timestamps, min(vocabulary.eos_token_ids), len(vocabulary.tokens))
        except Refused as refusal:
            raise RequestError(f"structured_outputs: timestamps: {refusal}.") from None

    def _known_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        return self._vocabulary

    def _parts_of(self, name: str) -> tuple[GrammarProcesses, Backend]:
        with self._preparing:
            if name not in self._parts:
                vocabulary = self._known_vocabulary()
                processes = GrammarProcesses(name, vocabulary)
                self._parts[name] = processes, make_backend(name, vocabulary, self._threads)
            return self._parts[name]
