"""A prompt and its completions as the front knows them: tokens become text here, and end at stop texts.

The rules are engine/sequences.py's, so a served text is the text of `Engine.generate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mllm_compile.media.workers import SharedPrompt
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.flow.offsets import TokenOffsets
from mllm_compile.server.wire.messages import Scores, StopReason
from mllm_compile.text.calls.events import End, Event, ReasoningDelta
from mllm_compile.text.calls.parser import CallParser
from mllm_compile.text.detokenizer import Decoder, Detokenizer
from mllm_compile.text.stop_strings import StopMatcher


class TextDecoder(Decoder, Protocol):
    """The part of a tokenizer that completions use."""

    @property
    def bytes_of_token(self) -> Callable[[int], bytes]:
        """A function that gives the bytes of a token as it is spelled."""


class PromptRun:
    """One prompt of a request.

    Attributes:
        key: its number on the wire.
        text: as the client gave it, None for token ids.
        decoder_ids: what a decoder begins with, whose encoder reads the prompt; None: there is no encoder.
        window: float32 of a window of sound, which the encoder reads, until it is sent.
        media: its images, whose memory is given back when its request is over.
        is_only_echoed: generate nothing (max_tokens 0); the engine makes one token, which is dropped.
        is_waiting: it has not been admitted yet.
        scores: log-probabilities of its tokens but the first, once they have come.
        kv_transfer_params: from where another engine fetches its pages, once it was computed for one.
    """

    def __init__(
        self,
        key: int,
        token_ids: list[int],
        text: str | None,
        is_only_echoed: bool,
        media: SharedPrompt | None = None,
        decoder_ids: list[int] | None = None,
        window: bytes | None = None,
    ) -> None:
        self.key = key
        self.window = window
        self.decoder_ids = decoder_ids
        self.media = media
        self.token_ids = token_ids
        self.text = text
        self.is_only_echoed = is_only_echoed
        self.is_waiting = True
        self.num_cached_tokens = self.num_host_tokens = self.num_disk_tokens = 0
        self.scores: list[Scores] = []
        self.kv_transfer_params: dict[str, Any] | None = None
        self.choices: list[Choice] = []

    @property
    def ids_ahead(self) -> list[int]:
        """The ids that an answer's tokens follow."""
        return self.token_ids if self.decoder_ids is None else self.decoder_ids


class Choice:
    """One completion.

    Attributes:
        index: its number in the answer, over all prompts.
        text, token_ids, scores, offsets: unsent parts; all of an answer that is sent whole. An offset is where a token
            with scores begins in the text: the characters that were whole before it.
        num_tokens: all so far.
        num_reasoning_tokens: those that a parser found to be reasoning.
        begin: where its text begins in what is sent: behind a prompt that is repeated.
        events: what `parser` has made of the text, as far as it is not sent.
        finish_reason: None while it runs; "stop", "length", "abort" or "error", by a parser also "tool_calls".
        versions: (weights' version, its first token), in order; none of an engine whose weights nobody has named.
        experts: int16 of the experts that its tokens and the prompt's chose, and their shape, once it has ended.
        was_admitted: it has had a row.
        has_begun: something of it was sent.
        end_is_told: a stream has been told how it ended.
    """

    __slots__ = (
        "_detokenizer",
        "_ending",
        "_matcher",
        "_min_tokens",
        "_num_read",
        "_parser",
        "_places",
        "_shows_end",
        "begin",
        "end_is_told",
        "events",
        "experts",
        "finish_reason",
        "has_begun",
        "index",
        "num_reasoning_tokens",
        "num_tokens",
        "offsets",
        "prompt",
        "scores",
        "stop_reason",
        "text",
        "token_ids",
        "versions",
        "was_admitted",
    )

    def __init__(
        self,
        prompt: PromptRun,
        index: int,
        params: SamplingParams,
        decoder: TextDecoder | None,
        parser: CallParser | None = None,
    ) -> None:
        self.prompt = prompt
        self.index = index
        self.text = ""
        self.events: list[Event] = []
        self.token_ids: list[int] = []
        self.scores: list[Scores] = []
        self.versions: list[tuple[str, int]] = []
        self.experts: tuple[bytes, list[int]] | None = None
        self.offsets: list[int] = []
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._num_read = 0  # tokens whose text is in events
        self.begin = 0
        self.finish_reason: str | None = None
        self.stop_reason: StopReason = None
        self.was_admitted = False
        self.has_begun = False
        self.end_is_told = False
        self._parser = parser
        self._min_tokens = params.min_tokens
        self._shows_end = params.include_stop_str_in_output
        self._ending: tuple[str, StopReason] | None = None
        self._detokenizer = (
            None if decoder is None else Detokenizer(decoder, prompt.ids_ahead, params.skip_special_tokens)
        )
        self._places = None
        if decoder is not None and params.logprobs is not None:
            hidden = decoder.special_token_ids if params.skip_special_tokens else frozenset[int]()
            self._places = TokenOffsets(decoder.bytes_of_token, hidden)
        self._matcher = (
            StopMatcher(tuple(params.stop), params.include_stop_str_in_output)
            if params.stop and decoder is not None
            else None
        )

    @property
    def is_ending(self) -> bool:
        """True if its last token comes with its end, which follows."""
        return self._ending is not None

    def will_end(self, reason: str, stop_reason: StopReason) -> None:
        """Says before its last token how it ends: a token that ends it is not shown."""
        self._ending = (reason, stop_reason)

    def has_version(self, version: str) -> None:
        """Notes that further tokens are of weights of that version."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, self.num_tokens))

    def take(self, token_id: int, scores: Scores | None) -> None:
        """Adds a token."""
        if self.prompt.is_only_echoed:
            return
        self.num_tokens += 1
        self.token_ids.append(token_id)
        if scores is not None:
            self.scores.append(scores)
            self.offsets.append(0 if self._places is None else self._places.next)
        if self._detokenizer is None:
            return
        ending = self._ending
        if ending is not None and ending[0] == "stop" and not isinstance(ending[1], str) and not self._shows_end:
            return
        text = self._detokenizer.push((token_id,))
        if self._places is not None:
            self._places.took(token_id, text, self._detokenizer.is_held)
        if text:
            self._add(text)
            self._end_parser()

    def _add(self, text: str) -> None:
        if self._matcher is not None and self.num_tokens >= self._min_tokens:
            text, matched = self._matcher.push(text)
            if matched is not None:
                self.finish_reason, self.stop_reason = "stop", matched
        self._show(text)

    def _show(self, text: str) -> None:
        self.text += text
        if self._parser is not None:
            self._read(self._parser.push(text))
            if self._parser.is_done and self.finish_reason is None:
                self.finish_reason = "stop"

    def _read(self, events: list[Event]) -> None:
        self.events += events
        if events:
            if isinstance(events[-1], ReasoningDelta):
                self.num_reasoning_tokens += self.num_tokens - self._num_read
            self._num_read = self.num_tokens

    def _end_parser(self) -> None:
        """Ends the parser with the completion: a stop behind a call is one for calls."""
        if self._parser is not None and self.finish_reason is not None:
            *events, end = self._parser.finish(self.finish_reason)
            self._parser = None
            self._read(events)
            self.events.append(end)
            if isinstance(end, End):
                self.finish_reason = end.finish_reason

    def end(self, reason: str, stop_reason: StopReason) -> None:
        """Ends it, unless a stop text has."""
        if self._detokenizer is not None and self.finish_reason is None and reason != "error":
            self._add(self._detokenizer.flush())
            if self._matcher is not None and self.finish_reason is None:
                self._show(self._matcher.flush())
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason
        self._end_parser()

    def sent(self) -> None:
        """Forgets what was sent."""
        self.has_begun = True
        self.text = ""
        self.events.clear()
        self.token_ids.clear()
        self.scores.clear()
        self.offsets.clear()
