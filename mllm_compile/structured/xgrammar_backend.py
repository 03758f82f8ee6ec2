"""XGrammar: pushdown automata with token masks computed ahead, in C++.

Nothing in it bounds the work of a mask, so masks are made on a thread that can be abandoned. A matcher that takes too
long is given up, with its thread and memory; after a few of them the backend takes no more. xgrammar_limits.py refuses
keys that it would ignore.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xgrammar

from mllm_compile.runtime.sampling.grammar import MaskWork
from mllm_compile.structured.form import Form, Refused, todays_tag
from mllm_compile.structured.vocabulary import Vocabulary
from mllm_compile.structured.xgrammar_limits import (
    kept_regex,
    kept_tag,
    refuse_ignored_keywords,
    refuse_ignored_look_ahead,
)

_MOST_WHITESPACE = 32  # as with llguidance
_MOST_MASK_S = 1.0  # of one matcher; most take microseconds
_MOST_LEFT_BEHIND = 4  # threads that may still run somewhere in C++
_MOST_SAID = 500
_TOO_LONG = f"xgrammar took more than {_MOST_MASK_S:g} s to find the tokens that may follow"
_NO_MORE = (
    f"{_MOST_LEFT_BEHIND} grammars took too long in xgrammar, which is not asked any more. Restart the engine, or set "
    "structured_outputs: {backend: llguidance}."
)


def make(vocabulary: Vocabulary, threads: int) -> XgrammarBackend:
    """The backend of a vocabulary."""
    return XgrammarBackend(vocabulary, threads)


@dataclass(frozen=True, eq=False)
class XgrammarGrammar:
    """A compiled form."""

    masks: XgrammarBackend
    compiled: xgrammar.CompiledGrammar
    first_time: int | None = None

    def matcher(self) -> xgrammar.GrammarMatcher:
        """The state of a new answer."""
        return xgrammar.GrammarMatcher(self.compiled)


class XgrammarBackend:
    """Backend of one vocabulary; see backend.py.

    Args:
        threads: that compile; masks are made by one, which others could not help in time.
    """

    def __init__(self, vocabulary: Vocabulary, threads: int) -> None:
        self.vocabulary = vocabulary
        tokens = list(vocabulary.tokens)
        for token_id in vocabulary.marks:  # no text has these bytes, and a token without any is never allowed
            tokens[token_id] = b"\xff%d" % token_id
        info = xgrammar.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=list(vocabulary.eos_token_ids))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
        self._worker: _Worker | None = None
        self._num_left_behind = 0

    def compile(self, form: Form) -> XgrammarGrammar:
        """Backend.compile."""
        try:
            return XgrammarGrammar(self, self._compiled(form))
        except (RuntimeError, ValueError, TypeError) as error:  # as it says that something is wrong
            raise Refused(_said(error)) from None

    def _compiled(self, form: Form) -> xgrammar.CompiledGrammar:
        if form.whitespace is not None:
            raise Refused("xgrammar has no whitespace_pattern. Set structured_outputs: {backend: llguidance}.")
        if form.kind == "json":
            refuse_ignored_keywords(json.loads(form.text))
            if form.is_compact:
                return self._compiler.compile_json_schema(
                    form.text, any_whitespace=False, separators=(",", ":"), strict_mode=False
                )
            return self._compiler.compile_json_schema(form.text, strict_mode=False, max_whitespace_cnt=_MOST_WHITESPACE)
        if form.kind == "regex":
            return self._compiler.compile_regex(kept_regex(form.text))
        if form.kind == "choice":
            choices = (json.dumps(text, ensure_ascii=False) for text in json.loads(form.text))
            return self._compiler.compile_grammar(f"root ::= {' | '.join(choices)}")
        if form.kind == "grammar":
            is_gbnf = "::=" in form.text
            if is_gbnf:
                refuse_ignored_look_ahead(form.text)
            return (self._compiler.compile_grammar if is_gbnf else self._compiler.compile_lark)(form.text)
        return self._compiler.compile_structural_tag(json.dumps(kept_tag(todays_tag(form.text), _MOST_WHITESPACE)))

    def fill(self, work: Sequence[MaskWork], masks: np.ndarray) -> dict[int, str]:
        """MaskMaker.fill."""
        faults: dict[int, str] = {}
        left = list(work)
        while left:
            if self._num_left_behind >= _MOST_LEFT_BEHIND:
                return faults | dict.fromkeys((part.row for part in left), _NO_MORE)
            if self._worker is None:
                self._worker = _Worker(masks.shape[1])
            num_done, new_faults = self._worker.run(left)
            faults |= new_faults
            done = left[:num_done]
            for part in done:
                masks[part.rows] = self._worker.masks[part.rows]
            if num_done < len(left):  # the next one takes too long, and the thread with it
                faults[left[num_done].row] = _TOO_LONG
                self._worker, self._num_left_behind = None, self._num_left_behind + 1
            left = left[num_done + 1 :]
        return faults


class _Worker:
    """A thread that makes masks, until it is left behind: it takes no further matcher then, as others have its work.

    Attributes:
        masks: [n, W] int32, the last masks, in the rows of the work. Its own: a thread that was left behind may write.
    """

    def __init__(self, width: int) -> None:
        self.masks = np.zeros((1, width), np.int32)
        self._work: queue.SimpleQueue[Sequence[MaskWork]] = queue.SimpleQueue()
        self._changed = threading.Condition()  # of the next three
        self._num_done = 0
        self._faults: dict[int, str] = {}
        self._is_left_behind = False
        threading.Thread(target=self._serve, name="xgrammar masks", daemon=True).start()

    def run(self, work: Sequence[MaskWork]) -> tuple[int, dict[int, str]]:
        """How many of `work` were done, in their order, and the faults of these; all but where one takes too long."""
        if len(self.masks) < (num_rows := max(part.rows.stop for part in work)):
            self.masks = np.zeros((num_rows, self.masks.shape[1]), np.int32)
        self._num_done, self._faults = 0, {}
        self._work.put(work)
        seen = 0
        with self._changed:
            while not self._wait_for(len(work)):
                if self._num_done == seen:
                    self._is_left_behind = True
                    break
                seen = self._num_done
            return self._num_done, self._faults

    def _wait_for(self, num: int) -> bool:
        """True if so many are done, in the time that one matcher may take."""
        return self._changed.wait_for(lambda: self._num_done == num, _MOST_MASK_S)

    def _serve(self) -> None:
        while True:
            work = self._work.get()
            begun = time.monotonic()
            for index, part in enumerate(work):
                fault = self._fill(part)
                now = time.monotonic()
                if fault is None and now - begun > _MOST_MASK_S:
                    fault = _TOO_LONG
                begun = now
                with self._changed:
                    if self._is_left_behind:
                        return
                    if fault is not None:
                        self._faults[part.row] = fault
                    self._num_done = index + 1
                    if self._num_done == len(work):
                        self._changed.notify()

    def _fill(self, part: MaskWork) -> str | None:
        """Why there is no mask, or None."""
        matcher = part.matcher
        try:
            for token_id in part.token_ids:
                if not matcher.accept_token(token_id):
                    return "xgrammar does not take a token that it has allowed"
            matcher.fill_next_token_bitmask(self.masks, part.row)
            if part.drafted:
                self._fill_behind_drafted(part)
        except (RuntimeError, ValueError) as error:
            return f"xgrammar cannot go on with the grammar: {_said(error)}"
        return None

    def _fill_behind_drafted(self, part: MaskWork) -> None:
        row = part.row
        for token_id in part.drafted:
            if not part.matcher.accept_token(token_id):
                break
            row += 1
            part.matcher.fill_next_token_bitmask(self.masks, row)
        self.masks[row + 1 : part.rows.stop] = 0
        if row > part.row:
            part.matcher.rollback(row - part.row)


def _said(error: Exception) -> str:
    return _cut(re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)))


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]}…"
