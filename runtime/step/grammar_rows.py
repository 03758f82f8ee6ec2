"""The grammars of the running requests: which tokens each may have next, made while the device computes its logits.

The mask of a step needs the tokens of the step before. So the step runner launches a step's forward first: its inputs
are on the device. Then it asks for masks here, which waits for those tokens. It launches the sampling last. The tokens
that a request's grammar has taken are counted against its output: a preemption or a step that it sat out needs no care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from mllm_compile.runtime.sampling.grammar import Grammar, MaskMaker, MaskWork
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.sampling.token_masks import TokenMask, TokenMasks
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.plan import StepPlan


class SampledStep(Protocol):
    """A step that was launched before."""

    def wait_for_tokens(self) -> None:
        """Blocks until its tokens are on the host."""

    def token_of(self, request: Request, place: int) -> int:
        """Its token for a request that it sampled. place: the request's likely place in it."""


@dataclass(slots=True)
class _Row:
    grammar: Grammar
    matcher: Any
    num_taken: int = 0  # tokens of the output that the matcher has taken
    is_over: bool = False  # end-of-sequence has come, or a fault


@dataclass(slots=True)
class _Masked:
    """A request's masks in a step.

    Attributes:
        new: tokens that the matcher takes ahead of them.
        draft: the drafted tokens; behind each there is a mask too.
        run: its row of StepPlan.runs, in a verify step.
        index: the place of the first among StepPlan.sampled; the others follow.
        first: the first of the masks.
        count: tokens of the output ahead of them.
    """

    request: Request
    row: _Row
    new: list[int]
    draft: list[int]
    run: int
    index: int
    first: int
    count: int

    @property
    def work(self) -> MaskWork:
        """Its part of a backend's work, up to an end of the draft: nothing follows that."""
        if not self.draft or self.request.had_broken_draft:
            return MaskWork(self.row.matcher, self.new, self.first)
        ends = self.request.eos_token_ids
        followed = takewhile(lambda token: token not in ends, self.draft)
        return MaskWork(self.row.matcher, self.new, self.first, list(followed))

    @property
    def behind(self) -> slice:
        """The masks behind the first."""
        return slice(self.first + 1, self.first + 1 + len(self.draft))

    def num_followed(self, bits: np.ndarray) -> int:
        """The drafted tokens that have a mask behind them; all may come behind the others, where nobody looks."""
        behind = bits[self.behind]
        followed = next((place for place, mask in enumerate(behind) if not mask.any()), len(behind))
        behind[followed:] = -1
        return followed


class GrammarRows:
    """The state of each running request's grammar. Used by one thread.

    Args:
        make_masks: the memory of the masks; called with the first request that has a grammar.
    """

    def __init__(self, make_masks: Callable[[], TokenMasks]) -> None:
        self._make_masks = make_masks
        self._masks: TokenMasks | None = None
        self._rows: dict[Request, _Row] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def admit(self, request: Request) -> None:
        """Begin with a request that got its row in this step; resumed, it takes its whole output again."""
        if request.grammar is not None:
            self._rows[request] = _Row(request.grammar, request.grammar.matcher())

    def leave(self, request: Request) -> None:
        """Forget a request that is over or was preempted."""
        self._rows.pop(request, None)

    def mask(self, batch: ScheduledBatch, plan: StepPlan, previous: SampledStep | None) -> TokenMask | None:
        """The mask of a step whose forward was launched; None: no sampled row has a grammar.

        Args:
            previous: the step before, where it is not known to be over.
        """
        if previous is not None:
            previous.wait_for_tokens()
        seq_lens, masked, num_masks = batch.seq_lens, list[_Masked](), 0
        for run, index, place, draft in _sampled(plan):
            request = batch.requests[place]
            row = self._rows.get(request)
            if row is None or row.is_over:
                continue
            count = int(seq_lens[place]) - len(draft) - len(request.prompt_token_ids)
            new = self._new_tokens(request, row, count, previous, place)
            if min(new, default=0) < 0 or not request.eos_token_ids.isdisjoint(new):
                row.is_over = True  # this step is one too many
                continue
            row.num_taken = count
            masked.append(_Masked(request, row, new, draft, run, index, num_masks, count))
            num_masks += 1 + len(draft)
        return self._send(plan, masked, num_masks) if masked else None

    def _new_tokens(
        self, request: Request, row: _Row, count: int, previous: SampledStep | None, place: int
    ) -> list[int]:
        output = request.output_token_ids
        new = output[row.num_taken : count]
        if len(output) < count:  # the newest is the step's before
            if previous is None:
                raise RuntimeError(f"internal error: request {request.request_id} has no token {count} of its output")
            new.append(previous.token_of(request, place))
        return new

    def _send(self, plan: StepPlan, masked: Sequence[_Masked], num_masks: int) -> TokenMask:
        if self._masks is None:
            self._masks = self._make_masks()
        bits = self._masks.begin()
        self._fill(masked, bits)
        draft_ids = None if plan.runs is None else plan.runs.draft_ids.copy()
        is_cut = False
        for one in masked:
            followed = one.num_followed(bits)
            if draft_ids is not None and followed < len(one.draft):
                draft_ids[one.run, followed:] = NO_TOKEN
                is_cut = True
            for place in range(max(0, min(followed + 1, one.request.params.min_tokens - one.count))):
                _forbid_stops(bits[one.first + place], one.request)
        rows = plan.token_indices[[one.index + place for one in masked for place in range(1 + len(one.draft))]]
        num_rows = plan.fields.sampled[0].size  # of logits
        is_whole = rows.size == num_rows and rows[0] == 0 and rows[-1] == num_rows - 1
        index, drafts = None if is_whole else rows, draft_ids if is_cut else None
        return self._masks.send(num_masks, index, drafts, _times(masked, num_masks))

    def _fill(self, masked: Sequence[_Masked], bits: np.ndarray) -> None:
        """Has all masks made. A grammar that fails with a draft begins again without: it may be the draft's fault."""
        left = {one.first: one for one in masked}
        while left:
            work: dict[MaskMaker, list[MaskWork]] = {}
            for one in left.values():
                bits[one.behind] = 0
                work.setdefault(one.row.grammar.masks, []).append(one.work)
            faults = {first: fault for maker, parts in work.items() for first, fault in maker.fill(parts, bits).items()}
            failed, left = left, {}
            for first, fault in faults.items():
                one = failed[first]
                bits[first] = bits[one.behind] = 0  # so no token is allowed
                if one.draft and not one.request.had_broken_draft:
                    one.request.had_broken_draft = True
                    one.row.matcher, one.new = one.row.grammar.matcher(), one.request.output_token_ids[: one.count]
                    left[first] = one
                else:
                    one.request.grammar_fault, one.row.is_over = fault, True


def _sampled(plan: StepPlan) -> Iterator[tuple[int, int, int, list[int]]]:
    """Sampled requests by number: where each one's first token is among plan.sampled, its index in the batch, and its
    draft."""
    runs = plan.runs
    if runs is None:
        yield from ((index, index, place, []) for index, place in enumerate(plan.sampled.tolist()))
        return
    firsts = runs.places[:, 0].tolist()
    for run, (index, place) in enumerate(zip(firsts, runs.requests.tolist(), strict=True)):
        draft = runs.draft_ids[run]
        yield run, index, place, draft[draft != NO_TOKEN].tolist()


def _times(masked: Sequence[_Masked], num_masks: int) -> tuple[int, np.ndarray] | None:
    """The first time of grammars that have some, which is one of a model, and whose masks these are; or None."""
    first_times = {one.first: one.row.grammar.first_time for one in masked}
    found = {place: first for place, first in first_times.items() if first is not None}
    if not found:
        return None
    is_asked = np.zeros(num_masks, dtype=bool)
    is_asked[list(found)] = True
    return next(iter(found.values())), is_asked


def _forbid_stops(bits: np.ndarray, request: Request) -> None:
    """Takes stop tokens out of a mask [W], unless it allows nothing else: its grammar is complete."""
    ids = np.fromiter(request.stop_ids, np.int64, len(request.stop_ids))
    others = bits.copy()
    np.bitwise_and.at(others.view(np.uint32), ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    if others.any():
        bits[:] = others
