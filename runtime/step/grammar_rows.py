"""The grammars of the running requests: which tokens each may have next, made while the device computes its logits.

The mask of a step needs the tokens of the step before. So the step runner launches a step's forward first: its inputs
are on the device. Then it asks for masks here, which waits for those tokens. It launches the sampling last. The tokens
that a request's grammar has taken are counted against its output: a preemption or a step that it sat out needs no care.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mllm_compile.runtime.sampling.grammar import Grammar, MaskMaker, MaskWork
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
        seq_lens = batch.seq_lens
        masked: list[tuple[int, Request, _Row, int]] = []  # index into plan.sampled, request, its row, output so far
        work: dict[MaskMaker, list[MaskWork]] = {}
        for index, place in enumerate(plan.sampled.tolist()):
            request = batch.requests[place]
            row = self._rows.get(request)
            if row is None or row.is_over:
                continue
            count = int(seq_lens[place]) - len(request.prompt_token_ids)
            new = self._new_tokens(request, row, count, previous, place)
            if min(new, default=0) < 0 or not request.eos_token_ids.isdisjoint(new):
                row.is_over = True  # this step is one too many
                continue
            row.num_taken = count
            work.setdefault(row.grammar.masks, []).append(MaskWork(row.matcher, new, len(masked)))
            masked.append((index, request, row, count))
        return self._send(plan, masked, work) if masked else None

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

    def _send(
        self, plan: StepPlan, masked: list[tuple[int, Request, _Row, int]], work: dict[MaskMaker, list[MaskWork]]
    ) -> TokenMask:
        if self._masks is None:
            self._masks = self._make_masks()
        bits = self._masks.begin()
        for maker, parts in work.items():
            for index, fault in maker.fill(parts, bits).items():
                _, request, row, _ = masked[index]
                request.grammar_fault, row.is_over = fault, True
                bits[index] = 0  # so no token is allowed
        for index, (_, request, _, count) in enumerate(masked):
            if count < request.params.min_tokens:
                _forbid_stops(bits[index], request)
        rows = plan.token_indices[[index for index, *_ in masked]]
        num_rows = plan.fields.sampled[0].size  # of logits
        is_whole = rows.size == num_rows and rows[0] == 0 and rows[-1] == num_rows - 1
        return self._masks.send(len(masked), None if is_whole else rows)


def _forbid_stops(bits: np.ndarray, request: Request) -> None:
    """Takes stop tokens out of a mask [W], unless it allows nothing else: its grammar is complete."""
    ids = np.fromiter(request.stop_ids, np.int64, len(request.stop_ids))
    others = bits.copy()
    np.bitwise_and.at(others.view(np.uint32), ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    if others.any():
        bits[:] = others
