"""The interface of drafters. A drafter guesses the next tokens of answers; schedule/drafts.py asks it, and a step of
the model checks the guesses. A bad guess costs time, and never changes a token. Free of torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

Draft = Sequence[int]


class DraftedRequest(Protocol):
    """The part of a request that drafters see; schedule/request.py has the class. They know requests by identity."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...

    @property
    def output_token_ids(self) -> Sequence[int]: ...

    @property
    def cache_salt(self) -> Hashable: ...

    @property
    def row(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request that is to get a draft.

    Attributes:
        most: most tokens of the draft, at least 1.
        num_computed: its tokens whose keys the model has: all but the last.
        pages: [P] int32: its pages, from the first on. They have room for the draft where the drafter keeps keys.
    """

    request: DraftedRequest
    most: int
    num_computed: int
    pages: np.ndarray


class Drafter(Protocol):
    """Guesses for all requests of a step. Used by one thread, while no step is in flight.

    Attributes:
        keeps_keys: it writes keys of drafted tokens to pages of its own, with the ids of the request's.
        keys_reach: its keys at a position depend on so many tokens behind it. So a page of a prefix is of use where
            the text goes on alike.
    """

    keeps_keys: bool
    keys_reach: int

    def propose(self, asked: Sequence[Asked]) -> Sequence[Draft]:
        """The tokens that may follow each, at most Asked.most; none where there is no guess."""

    def leave(self, request: DraftedRequest) -> None:
        """The request gives up its pages now, which others may share: it is over, or preempted."""

    def end(self, request: DraftedRequest) -> None:
        """Forgets a request that is over."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How the scheduler speculates.

    Attributes:
        drafter: guesses.
        num_tokens: most tokens of a draft.
        vocab_size: a draft ends before an id that is not below it.
        by_cost: how many of these a draft may have is chosen for each step and request.
        captured: tokens of a draft, ascending → most requests of a step of one launch whose drafts have up to so many.
        is_on_device: in such a step the device can draft by itself.
        keys_ahead: tokens behind those of such a step that the device's drafter writes keys of.
        fills: every draft has as many tokens as it may have. A synthetic acceptance is measured so.
    """

    drafter: Drafter
    num_tokens: int
    vocab_size: int
    by_cost: bool = False
    captured: Mapping[int, int] = field(default_factory=dict)
    is_on_device: bool = False
    keys_ahead: int = 0
    fills: bool = False
