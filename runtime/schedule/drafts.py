"""The drafts of a step's decodes: who may have one, and how long it may be.

A draft takes only tokens and pages that the step's prompts leave: none preempts a request, or holds a prompt up. It is
made while no step is in flight, when the host knows every token, and is used at once. So none outlives a preemption.
Free of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from mllm_compile.runtime.config_sections import most_drafted_by_cost
from mllm_compile.runtime.schedule.ahead import Ahead, may_be_ahead
from mllm_compile.runtime.schedule.batch_builder import NOTHING_DRAFTED, Drafted, RunningDecodes
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.draft_depths import DraftDepths
from mllm_compile.runtime.schedule.quiet_drafts import QuietDrafts
from mllm_compile.runtime.schedule.request import Request, RequestStatus
from mllm_compile.runtime.schedule.rows import Rows
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, TokenRuns
from mllm_compile.runtime.speculation.acceptance_rates import HOPE
from mllm_compile.runtime.speculation.drafter import Asked, Draft, Speculation
from mllm_compile.runtime.speculation.texts import TextDrafter

logger = logging.getLogger(__name__)


class Drafts:
    """See the module's header.

    Args:
        rows: what requests hold.

    Attributes:
        depths: chooses how long drafts may be; None: all alike.
        ahead: plans steps whose drafts the device makes; None: it makes none.
    """

    def __init__(self, speculation: Speculation, rows: Rows, config: SchedulerConfig) -> None:
        self._speculation, self._rows = speculation, rows
        # Tokens at which a request is computed anew; None: at none.
        self._boundary = config.rope.boundary if config.rope is not None and config.rope.recomputes else None
        self._told: set[str] = set()  # reasons in the log
        self.depths: DraftDepths | None = None
        self._quiet: QuietDrafts | None = None
        if speculation.by_cost:
            if isinstance(speculation.drafter, TextDrafter) and not speculation.is_on_device:
                self._quiet = QuietDrafts(speculation.drafter, speculation.num_tokens)
            num_rows = rows.computed.size
            most_in_step = most_drafted_by_cost(rows.most)
            hope = HOPE if self._quiet is None else 0.0
            self.depths = DraftDepths(num_rows, speculation.num_tokens, most_in_step, speculation.captured, hope)
        self.ahead: Ahead | None = None
        if speculation.is_on_device and self._boundary is None:
            self.ahead = Ahead(speculation, rows, config.max_num_batched_tokens, self.depths)

    def awaits_tokens(self, requests: Sequence[Request], in_flight: bool) -> bool:
        """True if the next step of these decodes may have drafts, which depend on a step that is in flight."""
        self.choose_depths(requests, in_flight)
        return in_flight and not self.are_off and any(map(self.may_draft, requests))

    def choose_depths(self, requests: Sequence[Request], in_flight: bool) -> None:
        """Chooses, where it is due, how long drafts of these decodes may be in the next step.

        Args:
            in_flight: a step is, whose tokens are not known.
        """
        if self.depths is None or not requests or not self.depths.is_due(in_flight):
            return
        drafted = [request for request in requests if self._may_have_any(request)]
        if self._quiet is not None:
            self.depths.learn(*self._quiet.look([request for request in drafted if not self.depths.of(request)]))
        captured = [depth for depth, most in self._speculation.captured.items() if most >= len(requests)]
        on_device = self.ahead is not None and all(map(may_be_ahead, requests))
        if captured or on_device:
            self.depths.choose_alike(drafted, len(requests), captured, on_device=on_device)
        else:
            self.depths.choose(drafted, len(requests), self._speculation.num_tokens)

    @property
    def are_off(self) -> bool:
        """The next step is without drafts, whatever its requests."""
        return self.depths is not None and not self.depths.is_on

    def may_draft(self, request: Request) -> bool:
        """False: the request is over, or gets no drafts in the next step, whatever its text."""
        return self._may_have_any(request) and (self.depths is None or self.depths.of(request) > 0)

    def _may_have_any(self, request: Request) -> bool:
        reason = self._obstacle(request)
        if reason is None:
            return request.status is RequestStatus.RUNNING
        if reason not in self._told:
            self._told.add(reason)
            logger.info("no tokens are drafted for requests with %s", reason)
        return False

    def plan(self, decodes: RunningDecodes, num_tokens: int) -> Drafted:
        """The drafts of these decodes, with their pages taken.

        Args:
            num_tokens: most tokens of all.
        """
        asked = dict(self._asked(decodes.requests, num_tokens))
        if not asked:
            return NOTHING_DRAFTED
        drafter = self._speculation.drafter
        if drafter.keeps_keys:
            for one in asked.values():
                self._take_pages(one.request.row, one.most + self._speculation.keys_ahead)
        drafts: list[Draft] = [()] * len(decodes.requests)
        for (index, one), proposed in zip(asked.items(), drafter.propose(list(asked.values())), strict=True):
            drafts[index] = draft = self._checked(one, proposed)
            self._take_pages(one.request.row, len(draft))
        return Drafted.of(decodes.requests, drafts) if any(drafts) else NOTHING_DRAFTED

    def planned(self, batch: ScheduledBatch, *, is_ahead: bool) -> None:
        """Notes a step: its figures tell how long drafts should be."""
        if self.depths is not None:
            self.depths.planned(batch, is_ahead)

    def took(self, batch: ScheduledBatch, ms: float) -> None:
        """Notes how long a step took."""
        if self.depths is not None:
            self.depths.took(batch, ms)

    def checked(self, batch: ScheduledBatch, runs: TokenRuns | None) -> None:
        """Notes what became of a step's drafts."""
        if self.depths is not None:
            self.depths.checked(batch, runs)

    def leave(self, request: Request) -> None:
        """A running request gives up its pages; where nobody shares them, the drafter does nothing for them."""
        if self._rows.shares_pages:
            self._speculation.drafter.leave(request)

    def end(self, request: Request) -> None:
        """Forgets a request that is over."""
        if self._quiet is not None:
            self._quiet.end(request)
        self._speculation.drafter.end(request)

    def _asked(self, requests: Sequence[Request], num_tokens: int) -> Iterator[tuple[int, Asked]]:
        """The requests that may have a draft, by their index: as the pages that are left, and `num_tokens` in all, let
        it be."""
        pages = self._rows.pages
        num_pages = pages.available_pages
        for index, request in enumerate(requests):
            if not self.may_draft(request):
                continue
            row, computed = request.row, int(self._rows.computed[request.row])
            held = int(pages.num_pages[row])
            behind = self._speculation.keys_ahead
            most = min(num_tokens, self._room(request), (held + num_pages) * pages.page_size - computed - 1 - behind)
            if most < 1:
                continue
            num_tokens -= most
            num_pages -= max(0, self._pages_of(row, most + behind) - held)
            yield index, Asked(request, most, computed, pages.table[row])

    def _room(self, request: Request) -> int:
        """Most tokens of a draft, pages aside: the token behind it has room, too."""
        most = self._speculation.num_tokens if self.depths is None else self.depths.of(request)
        most = min(most, request.max_new_tokens - len(request.output_token_ids) - 1)
        if self._boundary is None:
            return most
        computed = int(self._rows.computed[request.row])
        return min(most, self._boundary - computed - 1) if computed < self._boundary else most

    def _take_pages(self, row: int, num_drafted: int) -> None:
        """Gives a row the pages of its next token and of so many drafted ones."""
        pages = self._rows.pages
        pages.grow(row, self._pages_of(row, num_drafted) - int(pages.num_pages[row]))

    def _pages_of(self, row: int, num_drafted: int) -> int:
        """The pages of a row's next token and of so many behind it, as far as a row goes."""
        pages = self._rows.pages
        return min(pages.pages_for(int(self._rows.computed[row]) + 1 + num_drafted), pages.table.shape[1])

    def _checked(self, asked: Asked, proposed: Draft) -> Draft:
        """The draft up to the first id that is none, in the length that is wanted."""
        draft, vocab_size = list(proposed[: asked.most]), self._speculation.vocab_size
        wrong = next((place for place, token in enumerate(draft) if not 0 <= token < vocab_size), None)
        if wrong is not None:
            del draft[wrong:]
        if self._speculation.fills:
            # By how the text begins: other tokens, that choose other experts.
            begin = asked.request.prompt_token_ids[: asked.most - len(draft)]
            draft += [token for token in begin if 0 <= token < vocab_size]  # an image's place may have another id
            draft += [asked.request.output_token_ids[-1]] * (asked.most - len(draft))
        return draft

    def _obstacle(self, request: Request) -> str | None:
        """Why a request gets no drafts."""
        if request.grammar is not None and self._speculation.fills:
            return "structured_outputs, which a synthetic acceptance would not keep to"
        if request.had_broken_draft:
            return "a draft behind which logits were no numbers, or a grammar failed"
        return None
