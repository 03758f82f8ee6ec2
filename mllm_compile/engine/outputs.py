"""The results of a request, in the shape that vLLM's users know.

Owns the plain data only; `sequences.py` fills it. In an answer (`Engine.generate`, `Engine.chat`) every field covers
the whole completion. In a stream (`Engine.stream`, `AsyncEngine.generate`) each RequestOutput holds what is new since
the one before: `text`, `token_ids` and `logprobs` of its completions, concatenated over the stream, are the answer's.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from mllm_compile.adapters.registry import Adapter

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token of a position: natural-log probability, rank (1 is the likeliest), its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class VocabularyLogprobs(Mapping[int, Logprob]):
    """Logprobs of every token of the vocabulary at one position, by token id, most probable first.

    4 bytes a token; a Logprob is made when it is asked for.

    Args:
        logprobs: [V] float32, by token id.
        text_of: the text of a token.
    """

    def __init__(self, logprobs: np.ndarray, text_of: Callable[[int], str | None]) -> None:
        self._logprobs = logprobs
        self._text_of = text_of

    def __getitem__(self, token_id: int) -> Logprob:
        if not isinstance(token_id, numbers.Integral) or not 0 <= token_id < len(self):
            raise KeyError(token_id)
        logprob = self._logprobs[token_id]
        rank = int((self._logprobs > logprob).sum()) + 1
        return Logprob(float(logprob), rank, self._text_of(int(token_id)))

    def __iter__(self) -> Iterator[int]:
        return iter(np.argsort(-self._logprobs, kind="stable").tolist())

    def __len__(self) -> int:
        return int(self._logprobs.size)


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The output tokens [start, end) that one version of the weights gave."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt (there are `SamplingParams.n`).

    Attributes:
        index: from 0 to n - 1.
        text: the output, without the stop text and special tokens unless they were asked for.
        token_ids: every sampled token, also the one that ended the completion.
        cumulative_logprob: sum of the sampled tokens' log-probabilities, if asked for.
        logprobs: for each token a mapping of ids, the sampled one and alternatives; None unless asked for.
        sampling_mask: for each token the ids that the filters kept, [≤ V] int32 ascending. None unless asked for, and
            where the request has no filter.
        routed_experts: [tokens of prompt and output - 1, layers, k] int16: the experts that each chose, once it has
            ended; None unless asked for.
        finish_reason: None while it runs; "error" when it was refused or a step failed.
        stop_reason: the stop text or id that ended it; None for the end-of-sequence token.
        weight_versions: the version of the weights of each span of tokens, once it has ended; None: there is but one.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    sampling_mask: list[np.ndarray] | None = None
    routed_experts: np.ndarray | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersion] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of a request, in seconds; None for what it never reached.

    Attributes:
        arrival_time: when the request came, seconds since the epoch.
        time_in_queue: from arrival to the first step that held it.
        prefill_time: from there to the first token.
        decode_time: from the first token to the last, of the completion that ended last.
        time_to_first_token: from arrival to the first token.
        total_time: from arrival to the last token.
        tokens_per_second: output tokens of all completions over `total_time`.
        drafted_tokens: tokens that were drafted for its completions (docs/speculation.md).
        accepted_tokens: those of them that are in the completions.
    """

    arrival_time: float
    time_in_queue: float | None = None
    prefill_time: float | None = None
    decode_time: float | None = None
    time_to_first_token: float | None = None
    total_time: float | None = None
    tokens_per_second: float | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt, or in a stream what is new of it.

    Attributes:
        request_id: what `abort` takes.
        prompt: its text; None when it was given as token ids.
        prompt_token_ids: the ids that the model saw, or its encoder.
        decoder_prompt_token_ids: the ids that the decoder of an encoder-decoder began with; None of another model.
        outputs: the completions by index; in a stream only those with news.
        finished: all completions have ended.
        prompt_logprobs: for each prompt token, None at the first; in a stream with the first output.
        num_cached_tokens: prompt tokens that the prefix cache held, or a tier behind it.
        num_host_tokens, num_disk_tokens: those of them that came from the host's memory, and from what is behind it:
            the disk, a store, or another engine.
        metrics: seconds of each phase; in a stream with the last output.
        error: why the request was refused or failed, when `finish_reason` is "error".
        kv_transfer_params: from where another engine fetches the prompt's pages, once it has ended; None unless
            do_remote_decode was asked for.
        adapter: the adapter that answered, with its name and version; None: the model alone.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    adapter: Adapter | None = None
    kv_transfer_params: dict[str, Any] | None = None
    decoder_prompt_token_ids: list[int] | None = None

    @property
    def first(self) -> CompletionOutput:
        """The first completion; an empty one in a stream's output that has no news of it."""
        if self.outputs and self.outputs[0].index == 0:
            return self.outputs[0]
        return CompletionOutput(index=0)

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.first.text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first completion."""
        return self.first.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first completion ended; None while it runs."""
        return self.first.finish_reason

    @property
    def logprobs(self) -> list[Mapping[int, Logprob]] | None:
        """Log-probabilities of the first completion, if asked for."""
        return self.first.logprobs
