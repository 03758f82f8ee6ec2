"""The life of a request in its scheduler: it comes, may be preempted and computed anew, and ends.

When each of these happens is decided elsewhere: by the scheduler's caller, in preemption.py, and in sampled_tokens.py.
A request that ends or is preempted while a step of it is in flight keeps its row until that step is over (rows.py).
Free of torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from mllm_compile.runtime.sampling.params import NONE_ALLOWED
from mllm_compile.runtime.schedule.admission import Admission
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.decodes import Decodes
from mllm_compile.runtime.schedule.drafts import Drafts
from mllm_compile.runtime.schedule.prompts import Prompts
from mllm_compile.runtime.schedule.request import FINISH_REASONS, Request, RequestStatus
from mllm_compile.runtime.schedule.rows import Rows
from mllm_compile.runtime.schedule.tiers.tiers import Tiers


class Lifecycle:
    """See the module's header.

    Attributes:
        unfinished: all requests that have come and not ended.
        num_preemptions: of all requests so far.
        tiers: the memory behind the prefix cache; None: no config asks for one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        rows: Rows,
        admission: Admission,
        prompts: Prompts,
        decodes: Decodes,
        drafts: Drafts | None,
        sequences: Iterator[int] | None,
    ) -> None:
        """Args: drafts, sequences: as Scheduler has them."""
        self.unfinished: set[Request] = set()
        self.num_preemptions = 0
        self.tiers: Tiers | None = None
        self._config, self._rows, self._admission = config, rows, admission
        self._prompts, self._decodes, self._drafts = prompts, decodes, drafts
        self._sequences = itertools.count() if sequences is None else sequences

    def add(self, request: Request) -> None:
        """Let a new request wait; as Scheduler.add."""
        config, num_prompt = self._config, len(request.prompt_token_ids)
        source_pages = config.pages_of_source(request.source)
        request.max_new_tokens = config.max_new_tokens(num_prompt, request.params.max_tokens, source_pages)
        if request.media is not None and request.media.sees_ahead:
            config.check_whole_images(request.media)
        if config.rope is not None:
            request.rope_len = num_prompt
        request.sequence = next(self._sequences)
        if request.session_tag is not None and config.enable_prefix_cache:
            request.session = self._rows.pages.cache.sessions.begin(request.session_tag)
        self.unfinished.add(request)
        self._admission.add(request)

    def preempt(self, request: Request, *, is_clean: bool = True) -> None:
        """Send a running request back to the queue; its pages come back at once, except pages worth caching.

        Args:
            is_clean: its pages hold no NaN.
        """
        row = request.row
        self.num_preemptions += 1
        num_computed = int(self._rows.computed[row])
        request.num_preemptions += 1
        self._stop_running(request)
        if is_clean:
            self._rows.give_up_pages(request)
        else:
            self._rows.discard_own_pages(request)
        request.begins_anew()
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        self._admission.put_back(request, num_computed)
        self._rows.give_back(row)

    def compute_anew(self, request: Request) -> None:
        """Preempt a request whose last page may hold NaN, of a draft; it is drafted no more."""
        request.had_broken_draft = True
        self.preempt(request, is_clean=False)

    def preempt_all(self) -> None:
        """Send all running requests back to the queue."""
        for request in [*self._prompts.begun, *self._decodes.current().requests]:
            self.preempt(request)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> bool:
        """End a request from outside; as Scheduler.finish."""
        if reason not in FINISH_REASONS:
            raise ValueError(f"finish reason {reason!r}; expected one of {', '.join(FINISH_REASONS)}")
        if request not in self.unfinished:
            return False
        self.end(request, reason, stop_reason)
        return True

    def end_broken(self, request: Request, token: int) -> bool:
        """End a request without a next token. False: it has ended already.

        Where its logits were no numbers its KV, and what it had from the cache, is not trusted; also what others
        published of the same prompt: it may be where they came from. A request that forbids all tokens costs others
        nothing.
        """
        if token == NONE_ALLOWED:
            request.forbids_all = True
        else:
            request.is_broken = True
            if self.tiers is not None:
                self.tiers.settle()
            self._rows.forget_prefix(request)
        return self.finish(request, "abort")

    def end(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        """End an unfinished request; its row and pages come back when its last step is over."""
        if self.tiers is not None:
            self.tiers.leave(request)
        if request.status is RequestStatus.WAITING:
            self._admission.remove(request)
        else:
            self._stop_running(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self.unfinished.remove(request)
        asked = request.params.kv_transfer_params
        if asked is not None and asked.do_remote_decode and reason != "abort" and self.tiers is not None:
            self._promise(self.tiers, request)
        if request.session is not None:
            num_tokens = len(request.prompt_token_ids)
            self._rows.pages.cache.sessions.over(request.session, num_tokens, request.num_cached_tokens)
        if self._drafts is not None:
            self._drafts.end(request)
        if request.row >= 0:
            self._rows.give_back(request.row)

    def _promise(self, tiers: Tiers, request: Request) -> None:
        """Has another engine find a request's prompt, but its last token: the logits behind it are to be computed."""
        if tiers.handover is not None:
            keys = request.cache_keys[: len(request.prompt_token_ids) - 1]
            tiers.handover.promise(request, keys, self._rows.salt(request))

    def _stop_running(self, request: Request) -> None:
        """Take a running request off what schedule() works on."""
        if not self._prompts.remove(request):
            self._decodes.note_end()
        if self._drafts is not None:
            self._drafts.leave(request)
