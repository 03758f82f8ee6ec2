"""An engine of a fake Whisper, with windows of one second: it writes down the digest of each window that it reads.

At temperature 0 it does not do SUNG and MUMBLED well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from mllm_compile.engine.decoder_prompts import DecoderPrompts
from mllm_compile.engine.engine import Engine
from mllm_compile.media.log_mel import LogMel
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.sources.facts import SourceFacts
from mllm_compile.runtime.sources.request import RequestSource
from mllm_compile.structured.grammars import Grammars
from mllm_compile.text.tokenizer import Tokenizer
from tests.fakes import FakeStepRunner, fake_engine

LOG_MEL = LogMel(bins=8, samples=16000)
STATES = 50
VOCAB = 51865  # from which on a Whisper knows languages
NAMES = ["startoftranscript", "en", "de", "translate", "transcribe", "startofprev", "nospeech", "notimestamps"]
SPECIAL_TOKENS = [f"<|{name}|>" for name in [*NAMES, *(f"{step / 50:.2f}" for step in range(51))]]
LANGUAGE = "de"
# Sounds of one window: the first is written down as one syllable again and again, the second as unlikely tokens, and in
# the last, unlikely too, nobody speaks.
_LEVEL = np.full(4000, 0.5, dtype=np.float32)
SUNG, MUMBLED, SILENT = np.concatenate([np.zeros(160, dtype=np.float32), _LEVEL]), 0 * _LEVEL, _LEVEL
SYLLABLES = " la" * 40
UNDERSTOOD = 0.6  # the temperature at which tokens of the second are likely
END_S = 0.5  # where a window with times says that its text ends


def said_of(samples: np.ndarray) -> str:
    """The text that is written down of a window's samples."""
    return said_of_window(LOG_MEL.window(samples))


def said_of_window(window: np.ndarray) -> str:
    """Likewise of a window [bins, frames]."""
    return _said(RequestSource.of_sound(window.ravel(), STATES))


def _said(source: RequestSource) -> str:
    return f" {source.digest.hex()[:6]}"


_SUNG, _MUMBLED, _SILENT = map(said_of, (SUNG, MUMBLED, SILENT))


class SpeechAnswers(FakeStepRunner):
    """Answers the start token alone with a language, and what is longer with the window's text."""

    tokenizer: Tokenizer

    def submit(self, batch: ScheduledBatch) -> Any:
        told = self.__dict__.setdefault("told", {})
        for request in batch.admitted:
            ids, source = request.all_token_ids.tolist(), request.source
            assert source is not None and source.window is not None and source.window.size == 8 * 100
            told[request.row] = self._answer(ids, source, request.params)
        handle = super().submit(batch)
        table = handle.output.scores
        if table is not None:
            scores = [_score(batch.requests[row]) for row in handle.output.score_rows.tolist()]
            handle.output = replace(handle.output, scores=replace(table, logprobs=np.array(scores, dtype=np.float32)))
        return handle

    def _answer(self, ids: list[int], source: RequestSource, params: SamplingParams) -> list[int]:
        find: Callable[[str], int | None] = lambda name: self.tokenizer.token_to_id(f"<|{name}|>")  # noqa: E731
        if ids[-1] == find("startoftranscript"):
            is_asked = list(params.allowed_token_ids or ()) == [find("nospeech")]
            return [find("nospeech" if is_asked else LANGUAGE) or 0]
        said = SYLLABLES if (_said(source), params.temperature) == (_SUNG, 0) else _said(source)
        text = self.tokenizer.encode(said, add_special_tokens=False)
        times = [] if ids[-1] == find("notimestamps") else [find(f"{END_S:.2f}") or 0]
        return [*text, *times, self.tokenizer.eos_token_id or 0]

    def _run(self, token_ids: list[int], draft: list[int]) -> list[int]:
        row = next(row for row, ids in self.slots.items() if ids is token_ids)
        rest = self.__dict__["told"][row]  # none: a step that was begun before the end was known
        token_ids.append(rest.pop(0) if rest else self.tokenizer.eos_token_id or 0)
        return token_ids[-1:]


def _score(request: Request) -> float:
    """The log-probability of a request's token."""
    assert request.source is not None
    said, params = _said(request.source), request.params
    if params.allowed_token_ids is not None:  # how likely nobody speaks, or which language
        return math.log(0.9 if said == _SILENT else 0.1)
    return -2.0 if said in (_MUMBLED, _SILENT) and params.temperature < UNDERSTOOD else -0.1


def fake_speech_engine(runner: SpeechAnswers, tokenizer: Tokenizer, files: dict[str, bytes]) -> Engine:
    runner.tokenizer = tokenizer
    start = tokenizer.token_to_id("<|startoftranscript|>")
    assert start is not None
    facts = SourceFacts(max_length=STATES, bins=LOG_MEL.bins, frames=LOG_MEL.frames)
    eos = tokenizer.eos_token_id or 0
    no_timestamps = tokenizer.token_to_id("<|notimestamps|>")
    vocabulary: Any = SimpleNamespace(tokens=[b""] * VOCAB, eos_token_ids=(eos,), no_timestamps=no_timestamps)
    return fake_engine(
        runner,
        grammars=Grammars(lambda: vocabulary, (), 1),
        tokenizer=tokenizer,
        tokenizer_files=files,
        vocab_size=VOCAB,
        eos_token_ids=frozenset({eos}),
        decoder=DecoderPrompts((start,), VOCAB, facts, tokenizer, LOG_MEL),
        max_source_len=STATES,
        max_num_batched_tokens=512,
        num_pages=2049,
    )
