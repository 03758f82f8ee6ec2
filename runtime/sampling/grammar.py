"""Grammars as the runtime sees them: it is handed compiled ones, and knows no backend. Free of torch.

mllm_compile/structured/ makes them. step/grammar_rows.py calls them, on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np


class MaskWork(NamedTuple):
    """One request's part of a step's masks.

    Attributes:
        matcher: the grammar's state, as Grammar.matcher made it.
        token_ids: the output's tokens that it has not taken yet; none is end-of-sequence.
        row: of the masks, to be written.
        drafted: tokens that may follow; none is end-of-sequence.
    """

    matcher: Any
    token_ids: Sequence[int]
    row: int
    drafted: Sequence[int] = ()

    @property
    def rows(self) -> slice:
        """Its rows of the masks: one, and another behind each drafted token."""
        return slice(self.row, self.row + 1 + len(self.drafted))


class MaskMaker(Protocol):
    """Makes masks for grammars of one backend."""

    def fill(self, work: Sequence[MaskWork], masks: np.ndarray) -> Mapping[int, str]:
        """Let each matcher take its tokens, then write which token may be next. Ends in bounded time.

        It also writes which may be next behind each drafted token, up to one that is not allowed; masks behind that
        are zeros. Matchers take no drafted token for good.

        Args:
            work: of any of this backend's grammars; each matcher once.
            masks: [≥ rows, ceil(V / 32)] int32; token t is bit t % 32 of word t // 32, set where it is allowed.

        Returns:
            By row why a matcher cannot go on; what such rows hold is not looked at, and its matcher is used no more.
        """


class Grammar(Protocol):
    """The form of an answer, compiled; any number of requests share it.

    Attributes:
        masks: makes the masks of its matchers.
        first_time: tokens from this one on are times: one of them is next where all together are likelier than any
            other token. None: there is no such rule.
    """

    masks: MaskMaker
    first_time: int | None

    def matcher(self) -> Any:
        """The state of a new answer."""
