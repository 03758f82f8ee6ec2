"""One generation request and its state: tokens, progress, times.

The scheduler alone changes the state fields; the engine reads them and fills the log-probabilities. Free of torch, so
that the whole scheduling policy can be tested without it. Read next: scheduled_batch.py, scheduler.py.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from mllm_compile.runtime.schedule.pages.sessions import Session, SessionTag

if TYPE_CHECKING:
    from mllm_compile.runtime.media.request import RequestMedia
    from mllm_compile.runtime.sampling.grammar import Grammar
    from mllm_compile.runtime.sampling.params import SamplingParams
    from mllm_compile.runtime.sampling.transfer_params import KVTransferParams
    from mllm_compile.runtime.sources.request import RequestSource

ALL = sys.maxsize
FINISH_REASONS = ("stop", "length", "abort")


class RequestStatus(Enum):
    """WAITING: new or preempted. RUNNING: holds a row and pages. FINISHED: gets no further token."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# Not compared by value: two requests are never the same one, and lists of requests are searched by identity.
@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """A request; the first thirteen fields are the caller's, the rest is state.

    Times are time.monotonic() seconds; None until the thing has happened.
    """

    request_id: str  # for people; the scheduler knows requests by identity
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower is more urgent, as in vLLM
    arrival_time: float = field(default_factory=time.monotonic)
    bad_phrases: tuple[tuple[int, ...], ...] = ()  # the tokens of params.bad_words
    cache_salt: tuple[Hashable, ...] = ()  # whatever else changes the KV: requests share pages within one salt only
    grammar: Grammar | None = None  # params.structured_outputs, compiled
    media: RequestMedia | None = None  # the prompt's images
    source: RequestSource | None = None  # what the encoder reads, of an encoder-decoder
    prompt_ids: np.ndarray | None = None  # prompt_token_ids as ids_of makes them, where they are made already
    session_tag: SessionTag | None = None  # what it asks of its pages in the prefix cache

    status: RequestStatus = RequestStatus.WAITING
    # Row of ReqToTokenPool, -1 when it has none. A request preempted while a step of its is in flight is WAITING but
    # keeps its row until that step is over: the row's token still comes in.
    row: int = -1
    sequence: int = -1  # order of arrival at the scheduler; with priority the order of service
    max_new_tokens: int = 0  # max_tokens clipped to what fits; set by Scheduler.add
    num_computed_tokens: int = 0  # tokens whose KV is known to be written; 0 again after a preemption
    num_cached_tokens: int = 0  # prefix hit of the first admission
    host_tokens: int = 0  # of num_cached_tokens those that came from the host's memory
    disk_tokens: int = 0  # likewise, from the disk
    num_preemptions: int = 0
    session: Session[Any] | None = None
    num_alike: int = ALL  # its first tokens with KV of the weights that its salt says; behind them there were new ones
    salt_anew: tuple[Hashable, ...] | None = None  # its salt once it is computed anew, where weights changed meanwhile
    adapter_slot: int = -1  # of its adapter on the device, while it has a row; -1: it has none
    rope_len: int = 0  # the length that RoPE's frequencies of its prompt are for, where they follow it; else 0
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # 'stop', 'length' or 'abort'
    stop_reason: int | str | None = None  # the stop token id or stop string; None for an EOS token
    output_logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    num_kept: int = 0  # ids of tokens that filters kept, in all of output_logprobs
    kv_transfer: KVTransferParams | None = None  # of one that has ended: from where another engine fetches its pages
    routed_experts: Any = None  # [tokens - 1, layers, k] int16 of one that has ended and asked for them
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    is_broken: bool = False  # its logits were no numbers: its KV may be none either
    forbids_all: bool = False  # its logits were numbers; its parameters, or its grammar, forbid all tokens
    grammar_fault: str | None = None  # why its grammar allows no token; the step runner says so
    had_broken_draft: bool = False  # behind a draft logits were no numbers, or its grammar failed
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # drafted ones
    stop_ids: frozenset[int] = field(init=False)  # ids that end it: stop_token_ids, and EOS unless ignored

    def __post_init__(self) -> None:
        stop_ids = frozenset(self.params.stop_token_ids or ())
        self.stop_ids = stop_ids if self.params.ignore_eos else stop_ids | self.eos_token_ids

    @property
    def all_token_ids(self) -> np.ndarray:
        """Prompt and output so far, [n] int64: what a recompute prefills."""
        return self._with_output(ids_of(self.prompt_token_ids) if self.prompt_ids is None else self.prompt_ids)

    @property
    def cache_keys(self) -> np.ndarray:
        """The prefix cache's numbers of all tokens, [n] int64: ids, keys of images where tokens take features, and of a
        source in place of the first."""
        if self.source is not None:
            return self.source.decoder_keys(self.all_token_ids)
        return self.all_token_ids if self.media is None else self._with_output(self.media.keys)

    def _with_output(self, prompt: np.ndarray) -> np.ndarray:
        return np.concatenate((prompt, ids_of(self.output_token_ids))) if self.output_token_ids else prompt

    def weights_changed(self, salt: tuple[Hashable, ...]) -> None:
        """Note that its KV from here on is of new weights, with no step of it in flight.

        Args:
            salt: of the new weights.
        """
        if self.status is RequestStatus.RUNNING:
            self.num_alike, self.salt_anew = min(self.num_alike, self.num_computed_tokens), salt
        else:
            self.cache_salt = salt

    def begins_anew(self) -> None:
        """Note that all of its KV will be computed by the weights of now."""
        if self.salt_anew is not None:
            self.cache_salt, self.salt_anew, self.num_alike = self.salt_anew, None, ALL

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Prompt log-probabilities were asked for and have not all come yet (an output token means they have)."""
        return self.params.prompt_logprobs is not None and not self.output_token_ids

    @property
    def urgency(self) -> tuple[int, int]:
        """Sort key: the smaller is served first and preempted last."""
        return (self.priority, self.sequence)


by_urgency = attrgetter("urgency")


def ids_of(token_ids: Sequence[int]) -> np.ndarray:
    """The ids [n] as int64, not to be written; in half the time that numpy takes for a list.

    Raises:
        struct.error: one is not an integer of 64 bits.
    """
    return np.frombuffer(struct.pack(f"{len(token_ids)}q", *token_ids), dtype=np.int64)
