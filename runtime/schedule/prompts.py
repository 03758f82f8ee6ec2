"""Chooses the chunks of prompts of a step: of those begun, then of those that wait, the most urgent first.

The policy: first a begun prompt gets its next chunk. Then waiting requests are admitted strictly in their order, as
long as the pages for all of a prompt are there. A prompt that the budget cuts leaves up to half of it to shorter ones
behind it, the shortest first. So it always gets half itself. How long a chunk may be is chunk_lengths.py's; what a step
has room for, pace.py's; what a waiting request needs, admission.py's. Free of torch.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from mllm_compile.runtime.schedule.admission import Admission
from mllm_compile.runtime.schedule.batch_builder import Chunk, RunningDecodes
from mllm_compile.runtime.schedule.chunk_lengths import ChunkLengths
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.decodes import Decodes
from mllm_compile.runtime.schedule.image_cuts import FeatureBudget
from mllm_compile.runtime.schedule.pace import Pace, PromptBudget
from mllm_compile.runtime.schedule.request import Request, RequestStatus, by_urgency
from mllm_compile.runtime.schedule.rows import Rows
from mllm_compile.runtime.schedule.state_copies import StateCopies

# How far behind the first in line a shorter prompt is looked for: it bounds the host's work of a step.
_LOOKED_AT = 256
# Requests that are passed by while they wait for a tier, likewise: each is looked at when pages have moved.
_PASSED_BY = 64


@dataclass(slots=True)
class PromptPlan:
    """The prompts of a step, while it is planned.

    Attributes:
        budget: what of the step is left for prompts.
        features: what of it is left for images.
        chunks: in the order of their rows.
        admitted: requests that got a row.
    """

    budget: PromptBudget
    features: FeatureBudget
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)


class Prompts:
    """The prompts that are not over.

    Attributes:
        begun: requests with a row whose last chunk is not planned, by urgency.
        admission: those without a row.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        rows: Rows,
        states: StateCopies,
        admission: Admission,
        decodes: Decodes,
        pace: Pace,
    ) -> None:
        self.begun: list[Request] = []
        self.admission = admission
        self._config = config
        self._rows = rows
        self._states = states
        self._decodes = decodes
        self._pace = pace
        self._lengths = ChunkLengths(config, rows, pace)

    def remove(self, request: Request) -> bool:
        """Take a running request out of the begun prompts; False: it decodes already."""
        is_begun = request in self.begun
        if is_begun:
            self.begun.remove(request)
        return is_begun

    @property
    def may_have_chunks(self) -> bool:
        """False: no prompt can be in the next step."""
        return bool(self.begun or (self.admission.waiting and self._rows.num_free))

    @property
    def longest(self) -> int:
        """Tokens that the longest prompt which is not over may still compute; a bound, as it looks at few."""
        begun = max(map(self._lengths.rest, self.begun), default=0)
        return max(begun, self.admission.longest if self.admission.waiting else 0)

    def plan(self, decodes: RunningDecodes) -> PromptPlan | None:
        """Plan what prompts take of a step beside these decodes; None: nothing, for sure.

        Those whose last chunk is planned join the decodes.
        """
        if not self.may_have_chunks:
            return None
        most = self._config.max_features_per_step
        plan = PromptPlan(self._budget(decodes), FeatureBudget(most, most))
        for request in list(self.begun):
            if plan.budget.tokens > 0:
                self._serve(plan, request)
        self._admit(plan)
        return plan

    def pages_of_first(self, decodes: RunningDecodes) -> int:
        """Pages that the most urgent begun prompt lacks for its next chunk, beside these decodes; 0: none is begun."""
        if not self.begun:
            return 0
        row = self.begun[0].row
        end = int(self._rows.computed[row]) + self._lengths.of_first(self.begun[0], self._budget(decodes))
        return max(0, self._rows.pages.pages_for(end) - int(self._rows.pages.num_pages[row]))

    def _budget(self, decodes: RunningDecodes) -> PromptBudget:
        """The part of a step that prompts may take beside these decodes."""
        num_decodes = len(decodes.requests)
        decode_keys = int(self._rows.computed[decodes.rows].sum()) + num_decodes if num_decodes else 0
        return self._pace.budget(num_decodes, decode_keys, self._config.max_num_batched_tokens - num_decodes)

    # --- chunks -------------------------------------------------------------------------------------------------------

    def _serve(self, plan: PromptPlan, request: Request) -> None:
        """Plan the next chunk of a prompt: all of it if the budget holds that, else with shorter ones beside it.

        After a cut the budget is used up.
        """
        if self._was_cut(plan, request):
            return
        budget, lengths = plan.budget, self._lengths
        rest, longest = lengths.rest(request), lengths.of_first(request, budget)
        is_cut = longest < rest
        if is_cut:
            if lengths.of_first(request, budget.half()):  # else what is left could be less than its next image
                self._serve_shorter(plan, request)
            longest = lengths.of_cut(request, budget)
        room = lengths.room(request)
        if room > 0:
            self._plan_chunk(plan, request, min(longest, room), most=min(budget.tokens, room))
        if is_cut:  # though rounding may have made it whole: those served beside it have had their chunk
            budget.tokens = 0

    def _serve_shorter(self, plan: PromptPlan, first: Request) -> None:
        """Plan chunks of prompts that have less left than `first`, in up to half of the budget, the shortest first.

        A page of the shortest, however little time there is.
        """
        lengths, rest = self._lengths, self._lengths.rest
        share, least = plan.budget.half(), self._config.page_size
        for request in sorted(self._shorter_than(first), key=rest):
            if share.tokens < 1:
                return
            if self._was_cut(plan, request):
                continue
            if request.status is RequestStatus.WAITING:
                if self._waits_for_load(request):
                    continue
                if not self._admit_before_begun(plan, request):  # the others are longer
                    return
            context = int(self._rows.computed[request.row])
            chunk = min(max(share.longest(context), least), share.tokens, rest(request))
            # Pages for all of a new one were there beside those for the rest of `first`.
            if request not in plan.admitted:
                of_first = lengths.of_first(first, plan.budget) + self._config.page_size
                chunk = min(chunk, lengths.room(request) - of_first)
            if chunk < 1:
                return
            self._plan_chunk(plan, request, chunk, most=chunk)
            share.take(chunk, context)
            encoded = self._encoded(request, share)
            share.tokens -= encoded
            plan.budget.tokens -= encoded
            if share.ms <= 0:
                return
            least = 1

    def _encoded(self, request: Request, budget: PromptBudget) -> int:
        """Tokens of the budget that the encoder takes: what it reads beside the step takes as long as tokens of it."""
        return min(self._rows.sources.num_encoded(request), max(budget.tokens, 0))

    def _shorter_than(self, first: Request) -> Iterator[Request]:
        """Prompts with less left than `first`, and of no lesser priority: those begun, and of the waiting some.

        None with images if `first` has some: it could wait for ever for the features that they are granted."""
        rest = self._lengths.rest(first)
        for request in (*self.begun, *itertools.islice(self.admission.waiting, _LOOKED_AT)):
            is_ready = request.status is RequestStatus.RUNNING or request.row < 0
            is_ready = is_ready and (request.media is None or first.media is None)
            if is_ready and request.priority <= first.priority and self._lengths.rest(request) < rest:
                yield request

    def _plan_chunk(self, plan: PromptPlan, request: Request, length: int, *, most: int) -> None:
        """Plan the next `length` tokens of a prompt, which has pages for them; up to `most` for an image's sake."""
        row, rows = request.row, self._rows
        start, token_ids = int(rows.computed[row]), rows.prefill_ids(row)
        if request.media is not None:
            length = self._lengths.with_whole_images(request, length, most)
            length = plan.features.cut(request.media, start, length)
            if not length:
                return
        length = self._states.cut(row, start, length)
        end = start + length
        needed = rows.pages.pages_for(end) - int(rows.pages.num_pages[row])
        rows.pages.grow(row, needed, whole=rows.pages.pages_for(token_ids.size))
        rows.computed[row] = end
        is_last = end == token_ids.size
        plan.chunks.append(Chunk(request, start, token_ids[start:end], is_last))
        plan.budget.take(length, start)
        self._states.save(request, end)
        if is_last:
            self.begun.remove(request)
            self._decodes.add(request)

    def _was_cut(self, plan: PromptPlan, request: Request) -> bool:
        """True if the step has a chunk of the request, which ended for the sake of a state or of an image."""
        may_be = self._config.num_snapshots > 0 or request.media is not None
        return may_be and any(chunk.request is request for chunk in plan.chunks)

    # --- requests that wait -------------------------------------------------------------------------------------------

    @property
    def _pages_of_begun(self) -> int:
        """Pages that begun prompts lack for the rest of them."""
        pages = self._rows.pages
        return sum(
            pages.pages_for(int(self._rows.prefill_ids(request.row).size)) - int(pages.num_pages[request.row])
            for request in self.begun
        )

    @property
    def _num_running(self) -> int:
        return len(self.begun) + len(self._decodes.requests)

    def _waits_for_load(self, request: Request) -> bool:
        admission = self.admission
        if admission.tiers is None:  # then nobody counts pages for it
            return False
        return admission.waits_for_load(admission.tiers, request, self._num_running, self._pages_of_begun)

    def _admit(self, plan: PromptPlan) -> None:
        """Give rows to waiting requests, strictly in their order, as long as their prompts' pages are there."""
        admission = self.admission
        place = 0  # behind those whose pages are being loaded
        while place < min(len(admission.waiting), _PASSED_BY) and self._rows.num_free and plan.budget.tokens > 0:
            request = admission.waiting[place]
            if not admission.is_ready(request):
                break
            if self._waits_for_load(request):
                place += 1
                continue
            # No pages are set aside: a begun prompt has used up the step's budget or the pages, or has a page left.
            if not admission.admit_first(request, self._num_running):
                break
            self._begin(plan, request)
            self._serve(plan, request)
            plan.budget.tokens -= self._encoded(request, plan.budget)

    def _admit_before_begun(self, plan: PromptPlan, request: Request) -> bool:
        """Admit a waiting request although a begun prompt is not over; False: it would take what others need.

        Those are the pages of begun prompts and of the first in line, and a row for that one.
        """
        pages, waiting = self._rows.pages, self.admission.waiting
        num_rows, set_aside = 1, self._pages_of_begun
        if request is not waiting[0]:
            of_source = self._config.pages_of_source(waiting[0].source)
            num_rows, set_aside = 2, set_aside + pages.pages_for(self._lengths.rest(waiting[0])) + of_source
        has_room = self._rows.num_free >= num_rows and self.admission.admit(request, self._num_running, set_aside)
        if has_room:
            self._begin(plan, request)
        return has_room

    def _begin(self, plan: PromptPlan, request: Request) -> None:
        """Note that a request was admitted."""
        plan.admitted.append(request)
        insort(self.begun, request, key=by_urgency)
