"""One engine step: ScheduledBatch → ForwardBatch → logits → tokens, with the host never waiting for the device.

Sampled ids stay on the device, where the next step's decodes read them; the host gets a copy when it asks. A step of
decodes alone is one launch if they are captured so (cuda_graph/decode_loop.py). The host work of any other step is one
packed upload, partly to the places that captured graphs read, and one asynchronous download. Steps run in the order in
which they are submitted, on one stream, so a step may be submitted before the tokens of the one before are known. Where
a request has a grammar, the model runs so; the choice of tokens is submitted when the tokens before are known, in the
time that the model takes (grammar_rows.py).

step/plan.py plans inputs and outputs. Used by one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import torch

from mllm_compile.runtime.attention.metadata import StepPrompts
from mllm_compile.runtime.device.packed_fields import upload_fields
from mllm_compile.runtime.device.staging import StagingBuffer, StagingRing
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.forward_batch import ForwardBatch
from mllm_compile.runtime.media.step_plan import MediaPlan
from mllm_compile.runtime.model_runner import LogitsProcessorOutput, ModelRunner
from mllm_compile.runtime.ranks.records import Choice, StepRecord
from mllm_compile.runtime.sampling.counter_rng import derive_seed
from mllm_compile.runtime.sampling.logprobs import TokenLogprobs, all_logprobs, token_logprobs
from mllm_compile.runtime.sampling.params import ALL_LOGPROBS, NO_TOKEN
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.sampling.token_masks import TokenMask, TokenMasks
from mllm_compile.runtime.schedule.batch_builder import NO_COPIES
from mllm_compile.runtime.schedule.dealt import own_copies, own_pages
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.dealt_plan import Deal
from mllm_compile.runtime.step.grammar_rows import GrammarRows
from mllm_compile.runtime.step.host_page_table import HostPageTable
from mllm_compile.runtime.step.media_steps import MediaSteps
from mllm_compile.runtime.step.output import ScoreTable, StepOutput
from mllm_compile.runtime.step.plan import StepPlan, plan_fixed_rows, plan_step, token_positions, with_media
from mllm_compile.runtime.step_fields import StepFields

if TYPE_CHECKING:
    from mllm_compile.runtime.cuda_graph.decode_loop import Turn

Announce = Callable[[StepRecord], None]

_SCORED_LOGITS = 2**26  # of prompt positions at a time: 128 MiB in 16 bits, however long the prompts are


class StepHandle:
    """A step that was launched; `wait` gives its result."""

    def __init__(self, batch: ScheduledBatch, plan: StepPlan, results: _Results) -> None:
        self._batch = batch
        self._plan = plan
        self._results = results

    def wait_for_tokens(self) -> None:
        """Block until the step's tokens are on the host."""
        self._results.tokens()

    def token_of(self, request: Request, place: int) -> int:
        """The token of a request that the step sampled, negative where it has none; after `wait_for_tokens`.

        Args:
            place: where the request stands in the batch most likely.
        """
        requests, plan, tokens = self._batch.requests, self._plan, self._results.tokens()
        if place >= len(requests) or requests[place] is not request:
            place = requests.index(request)
        assert tokens is not None, "the request was sampled"
        return int(tokens[plan.token_indices[np.searchsorted(plan.sampled, place)]])

    def wait(self) -> StepOutput:
        """Block until the step is over.

        Raises:
            RuntimeError: what went wrong on the device, in this step or one before it.
        """
        tokens, scores, prompt_scores = self._results.fetch()
        plan = self._plan
        token_ids = np.full(self._batch.num_requests, NO_TOKEN, dtype=np.int64)
        if tokens is not None:
            token_ids[plan.sampled] = tokens[plan.token_indices]
        targets = plan.fields.prompt_targets
        return StepOutput(
            token_ids=token_ids,
            requests=self._batch.requests,
            scores=_table(tokens, scores, plan.token_indices),
            score_rows=plan.sampled,
            prompt_scores=_table(targets, prompt_scores, plan.score_indices),
            prompt_rows=plan.prompt_rows,
            all_scores=self._results.fetch_all(),
        )


class StepRunner:
    """Runs ScheduledBatches on a ModelRunner. Used by one thread.

    Attributes:
        state: sampling parameters of the requests that hold a row.
        media: the images of steps.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, announce: Announce | None = None) -> None:
        """
        Args:
            announce: told of each step before it is launched, for ranks that follow; None: there are none.
        """
        self._runner = runner
        self._announce = announce
        self._sampler = sampler
        self.state = runner.row_state.sampling
        with torch.inference_mode(), runner.on_device():
            self.state.clear_all()
        self._last_tokens = runner.row_state.last_tokens
        num_rows = self._last_tokens.shape[0]
        self._uploads, self._downloads = StagingRing(runner.device), StagingRing(runner.device)
        runtime = runner.config.runtime
        # Prompt positions of each rank whose logits are made at a time.
        self._scored_at_once = max(1, _SCORED_LOGITS // runner.vocab_size // runner.num_deals)
        self._deal = None
        if runner.num_deals > 1 and runner.communicator is not None:
            num_ranks, most = runner.num_deals, runtime.max_running_requests
            self._deal = Deal(runner.communicator.rank, num_ranks, most, self._scored_at_once)
        self._pages = HostPageTable(num_rows, runtime.max_model_len, runtime.page_size)
        self.media = MediaSteps(runner, num_rows)
        self._row_owners: dict[int, Request] = {}  # requests whose parameters are in `state`
        self._grammars = GrammarRows(lambda: TokenMasks(num_rows, runner.vocab_size, runner.device))
        self._previous: StepHandle | None = None  # the last step, if a request in a row has a grammar
        # The last batch's: ScheduledBatch promises the very same list while no request comes or goes.
        self._seen_requests: list[Request] | None = None
        self._followed: ScheduledBatch | None = None  # the batch whose requests are in the sampling state
        self._is_in_step = np.zeros(num_rows, dtype=bool)  # by row; all False between two looks
        self._of_thread = threading.local()

    def prepare_thread(self) -> None:
        """Makes the calling thread one that submits, as long as it lives: without gradients, on the runner's GPU, with
        its rank's communicator. Where another submits, each of its steps begins with that."""
        held = self._of_thread.held = ExitStack()
        held.enter_context(torch.inference_mode())
        held.enter_context(self._runner.on_device())

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Launch a step without waiting for it, nor for the one before.

        Raises:
            DeviceMemoryError: the step's activations do not fit, or what sampling needs; no request gets a token of it.
        """
        try:
            if hasattr(self._of_thread, "held"):
                return self._submit(batch)
            with torch.inference_mode(), self._runner.on_device():
                return self._submit(batch)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"a step of {batch.num_tokens} tokens of {batch.num_requests} requests ran out of memory: {error} "
                "Lower runtime.mem_fraction_static or runtime.max_num_batched_tokens, or ask for fewer prompt_logprobs "
                "at once."
            ) from error

    def _submit(self, batch: ScheduledBatch) -> StepHandle:
        self._enter_pages(batch)
        self.media.admit(batch.admitted)
        plan = self._plan(batch)
        index = plan.fields.positions if self._deal is None else token_positions(batch)
        media = self.media.plan(batch, index)
        choice = Choice.SAMPLED
        if self._announce is not None:
            choice = self._choice(batch, plan)
            scored = plan.fields.scored_indices if plan.scored is None else plan.scored
            self._announce(StepRecord(batch, scored, media, choice))
        plan = self._with_media(plan, batch, media)
        results = self._run_prompts(batch, plan)
        if results is None:
            self._restore_states(batch.state_restores)
            results = self._decode(batch, plan, choice) or self._run(batch, plan, choice)
        self._save_states(batch)
        handle = StepHandle(batch, plan, results)
        self._previous = handle if self._grammars else None
        return handle

    def _enter_pages(self, batch: ScheduledBatch) -> None:
        """Enters new pages on the host, and clears those that held what was no number."""
        if batch.page_ids.size:
            self._pages.write(batch.page_rows, batch.page_positions, batch.page_ids)
        cleared, pool = batch.cleared_pages, self._runner.token_to_kv_pool
        if self._deal is not None:
            cleared = own_pages(cleared, self._deal.rank, pool.num_pages)
        if cleared.size:
            pool.clear_pages(upload(cleared.astype(np.int64), self._runner.device))

    def _restore_states(self, restores: np.ndarray) -> None:
        """Copies states of prefixes to the requests that begin with them."""
        self._copy_states(restores, 1)

    def _save_states(self, batch: ScheduledBatch) -> None:
        """Copies states of requests that are kept for others."""
        self._copy_states(batch.state_saves, 0)

    def _copy_states(self, copies: np.ndarray, request_column: int) -> None:
        """Copies rows of states: [N, 2], from and to, of which one is a request's."""
        if copies.size and self._deal is not None:
            copies = own_copies(copies, request_column, self._deal.rank, self._deal.rows_of_rank)
        if copies.size:
            self._runner.state_pool.copy_rows(copies)

    def _choice(self, batch: ScheduledBatch, plan: StepPlan) -> Choice:
        """How ranks come to the step's tokens."""
        self._follow_rows(batch)
        flags = self.state.flags
        if self._grammars or not flags.chooses_plainly:
            return Choice.SAMPLED
        is_together = flags.takes_largest and self._deal is None and plan.fields.prompt_targets is None
        return Choice.TOGETHER if is_together else Choice.IN_GRAPH

    def _decode(self, batch: ScheduledBatch, plan: StepPlan, choice: Choice) -> _Results | None:
        """Runs the step in one launch; None: it has more than decodes, or these are not captured so.

        The device's table of slots hears of a new page by the slot of its first token: decodes get no others.
        """
        shared = self._common_prefix_len(batch)
        if not self._is_captured(batch, shared):
            return None
        self._follow_rows(batch)
        self.state.flush()
        fields, flags = plan.fields, self.state.flags
        deltas = None if plan.media is None else plan.media.deltas
        rows = fields.req_pool_indices
        together = choice is Choice.TOGETHER
        decode = self._runner.decode(rows, fields.seq_lens, fields.out_cache_loc, deltas, shared, together)
        mask = self._mask(batch, plan)
        if not flags.chooses_plainly or mask is not None:  # then the graph's choice is not used
            output = LogitsProcessorOutput(decode.logits)
            return self._sample(batch, plan, output, (decode.rows, decode.seq_lens), mask=mask)
        if flags.max_logprobs is None:
            scores = None
        else:
            scores = token_logprobs(decode.logits, decode.tokens, flags.max_logprobs)
        all_scores = self._score_all(batch, plan, decode.logits)
        if choice is Choice.SAMPLED:
            self._runner.spread_tokens()  # followers are told of this ahead of the masks
        return _Results(decode.turn, decode.turn.tokens[: rows.size], scores, all_scores=all_scores)

    def _is_captured(self, batch: ScheduledBatch, common_prefix_len: int) -> bool:
        """True if the step is one launch."""
        if batch.num_decodes < batch.num_requests or not self._gets_own_pages(batch):
            return False
        if self._deal is not None:
            return self._runner.holds_decode(self._deal.most_requests(batch))
        holds = self._runner.holds_cascade if common_prefix_len else self._runner.holds_decode
        return holds(batch.num_requests)

    def _gets_own_pages(self, batch: ScheduledBatch) -> bool:
        """True if the step's new pages are of its own requests, not of one that was admitted and waits for its first
        tokens."""
        if not batch.page_ids.size:
            return True
        self._is_in_step[batch.rows] = True
        is_own = bool(self._is_in_step[batch.page_rows].all())
        self._is_in_step[batch.rows] = False
        return is_own

    def _common_prefix_len(self, batch: ScheduledBatch) -> int:
        """The first tokens of the step's decodes that are to be read once for all of them; 0: none."""
        count, runtime, page_size = batch.num_decodes, self._runner.config.runtime, self._pages.page_size
        cascades = self._runner.attn_backend.cascades if runtime.cascade_attention else None
        if count < 2 or cascades is None or runtime.deterministic or self._deal is not None:
            return 0
        most = int(batch.prefix_lens[:count].min()) // page_size
        is_alone = count == batch.num_requests
        is_captured = is_alone and self._runner.holds_cascade(count)
        if is_alone and not is_captured and self._runner.holds_decode(count):
            return 0  # one launch is worth more
        pays = cascades.cascade_pays
        if not pays(count, most * page_size, is_captured):  # whatever they share
            return 0
        num_tokens = self._pages.common_pages(batch.rows[:count], most) * page_size
        return num_tokens if pays(count, num_tokens, is_captured) else 0

    def _first_slot(self, batch: ScheduledBatch) -> int | None:
        """The slot of the first token of a step's only prompt, where all its pages follow each other; None of one
        without a prefix."""
        if batch.num_requests - batch.num_decodes != 1 or not batch.prefix_lens[-1]:
            return None
        return self._pages.first_slot_in_a_row(int(batch.rows[-1]), int(batch.seq_lens[-1]))

    def _launch(
        self, batch: ScheduledBatch, plan: StepPlan, choice: Choice
    ) -> tuple[LogitsProcessorOutput, StepFields[torch.Tensor]]:
        """Brings the step's arrays to the device, new pages among them, and runs the model."""
        self._add_new_pages(plan, batch)
        batch = plan.own or batch
        self._follow_lengths(batch, plan)
        takes_features = plan.media is not None and plan.media.rows.size > 0
        media = self.media.inputs(plan.media) if takes_features else None  # type: ignore[arg-type]
        fields = self._upload(plan.fields)
        if media is None and self._runner.always_takes_features:
            media = self.media.no_features(fields.positions)
        forward_batch = self._forward_batch(batch, plan, fields)
        forward_batch.common_prefix_len = self._common_prefix_len(batch)
        forward_batch.first_slot = self._first_slot(batch)
        if media is not None:
            forward_batch.media, forward_batch.mrope_positions = media
        forward_batch.rope_lens = fields.rope_lens
        forward_batch.dp_metadata = plan.across
        forward_batch.tokens_alone = choice is Choice.TOGETHER
        if self._runner.reads_pages(forward_batch):
            self._list_new_pages(fields)
            return self._runner.forward(forward_batch), fields
        try:
            return self._runner.forward(forward_batch), fields
        finally:  # some may be of requests that are not in this step, which can fail
            self._list_new_pages(fields)

    def _run_prompts(self, batch: ScheduledBatch, plan: StepPlan) -> _Results | None:
        """Runs the step in one launch and that of its head; None: it has more than prompts, or these are not captured
        so."""
        has_more = batch.num_decodes or plan.is_decode or plan.own is not None or plan.media is not None
        if has_more or plan.fields.scored_indices is not None:
            return None
        starts = np.zeros(batch.num_requests + 1, dtype=np.int32)
        np.add.accumulate(batch.num_new, out=starts[1:])
        rows, seq_lens = batch.rows, batch.seq_lens
        state_rows, restores = _read_in_place(batch.state_restores, rows)
        prompts = StepPrompts(starts, batch.prefix_lens, rows, state_rows, lambda: self._pages.pages_of(rows, seq_lens))
        launched = self._runner.launch_prompts(plan.fields, prompts)
        if launched is None:
            return None
        fields = launched.fields
        self._restore_states(restores)
        assert fields.logits_indices is not None, "a plan that is no decode has some"
        try:
            output = launched.head(fields.logits_indices)
            self._follow_rows(batch)
            return self._sample(batch, plan, output, fields.sampled, fields, mask=self._mask(batch, plan))
        finally:  # some may be of requests that are not in this step, which can fail
            self._bring_new_pages(batch)

    def _bring_new_pages(self, batch: ScheduledBatch) -> None:
        """Enters the step's new pages in the device's table of slots, behind all that its tokens wait for: captured
        prompts read a list of pages of their own, and the table is for the steps behind them."""
        if batch.page_ids.size:
            pages = upload_fields(self._new_pages(batch), self._uploads, self._runner.device)
            self._runner.req_to_token_pool.write_page_slots(pages["page_places"], pages["page_slots"])

    def _run(self, batch: ScheduledBatch, plan: StepPlan, choice: Choice) -> _Results:
        output, fields = self._launch(batch, plan, choice)
        self._follow_rows(batch)  # while the device is busy
        return self._sample(batch, plan, output, fields.sampled, fields, mask=self._mask(batch, plan))

    def _mask(self, batch: ScheduledBatch, plan: StepPlan) -> TokenMask | None:
        """The mask of the step, whose forward was launched; waits for the step before if any request has a grammar."""
        return self._grammars.mask(batch, plan, self._previous) if self._grammars else None

    def _plan(self, batch: ScheduledBatch) -> StepPlan:
        config = self._runner.config
        if config.runtime.deterministic:
            return plan_fixed_rows(batch, self._pages, config.runtime.max_num_batched_tokens)
        if self._deal is not None:
            return self._plan_dealt(batch, self._deal)
        return plan_step(batch, self._pages)

    def _with_media(self, plan: StepPlan, batch: ScheduledBatch, media: MediaPlan | None) -> StepPlan:
        """The plan with the positions and features of the step's images, of which a rank may have a part."""
        return with_media(plan, media) if self._deal is None else self._deal.with_media(plan, batch, media)

    def _plan_dealt(self, batch: ScheduledBatch, deal: Deal) -> StepPlan:
        captured = self._runner.decode_size(deal.most_requests(batch)) if self._is_captured(batch, 0) else None
        return deal.plan(batch, self._pages) if captured is None else deal.plan_decode(batch, self._pages, *captured)

    def _follow_lengths(self, batch: ScheduledBatch, plan: StepPlan) -> None:
        """Adds the lengths that a model's RoPE follows, where the step has prompts."""
        if self._runner.model.rope is not None and batch.num_decodes < batch.num_requests:
            plan.fields.rope_lens = np.zeros_like(plan.fields.positions)
            plan.fields.rope_lens[: batch.num_tokens] = np.repeat(batch.rope_lens, batch.num_new)

    def _upload(self, arrays: StepFields[np.ndarray]) -> StepFields[torch.Tensor]:
        """The arrays on the device; inputs of the model in the graphs' own places if they fit."""
        device, graphs = self._runner.device, self._runner.graph_runner
        if graphs is not None and graphs.inputs.holds(arrays.positions.size, arrays.seq_lens.size):
            return graphs.inputs.upload(arrays)
        return StepFields(**upload_fields(arrays.inputs() | arrays.others(), self._uploads, device))

    def _add_new_pages(self, plan: StepPlan, batch: ScheduledBatch) -> None:
        """Adds new pages to what the plan brings to the device."""
        if batch.page_ids.size:
            pages = self._new_pages(batch)
            plan.fields.page_places, plan.fields.page_slots = pages["page_places"], pages["page_slots"]

    def _new_pages(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        """The step's new pages, as StepFields has them."""
        return {
            "page_places": self._pages.places_of(batch.page_rows, batch.page_positions),
            "page_slots": self._pages.slots_of(batch.page_ids),
        }

    def _list_new_pages(self, fields: StepFields[torch.Tensor]) -> None:
        """Enters the step's new pages, which came with its inputs, in the device's table of slots."""
        if fields.page_places is not None and fields.page_slots is not None:
            self._runner.req_to_token_pool.write_page_slots(fields.page_places, fields.page_slots)

    def _forward_batch(self, batch: ScheduledBatch, plan: StepPlan, fields: StepFields[torch.Tensor]) -> ForwardBatch:
        rows, input_ids = fields.req_pool_indices, fields.input_ids
        if batch.num_decodes:
            torch.index_select(self._last_tokens, 0, rows[: batch.num_decodes], out=input_ids[: batch.num_decodes])
        if plan.is_decode:
            forward_batch = self._runner.prepare_forward_batch_decode(
                input_ids,
                rows,
                fields.seq_lens,
                fields.out_cache_loc,
                seq_lens_cpu=torch.from_numpy(plan.fields.seq_lens.astype(np.int32, copy=False)),
                return_logprob=fields.scored_indices is not None,
                positions=fields.positions,
            )
            forward_batch.logits_indices = fields.logits_indices
            return forward_batch
        num_new, prefix_lens = fields.num_new, fields.prefix_lens
        assert num_new is not None and prefix_lens is not None, "a plan that is no decode has both"
        forward_batch = self._runner.prepare_forward_batch_extend(
            input_ids,
            rows,
            fields.seq_lens,
            num_new,
            prefix_lens,
            fields.out_cache_loc,
            num_decodes=batch.num_decodes,
            extend_seq_lens_cpu=torch.from_numpy(batch.num_new.copy()),
            extend_prefix_lens_cpu=torch.from_numpy(batch.prefix_lens.copy()),
            return_logprob=fields.scored_indices is not None,
            positions=fields.positions,
        )
        forward_batch.logits_indices = fields.logits_indices
        return forward_batch

    def _sample(
        self,
        batch: ScheduledBatch,
        plan: StepPlan,
        output: LogitsProcessorOutput,
        sampled_rows: tuple[torch.Tensor, torch.Tensor],
        fields: StepFields[torch.Tensor] | None = None,
        *,
        mask: TokenMask | None,
    ) -> _Results:
        """Chooses the tokens of `sampled_rows` (StepFields.sampled); scores prompts, which need `fields`."""
        tokens = scores = prompt_scores = all_scores = None
        logits = output.next_token_logits
        if plan.sampled.size:
            rows, positions = sampled_rows
            if output.is_own_part:
                tokens = self._runner.choose_together(output)
            else:
                sampled = self._sampler(logits, self.state, rows, self.state.flags, positions, mask)
                tokens, scores = sampled.token_ids, sampled.logprobs
                all_scores = self._score_all(batch, plan, logits)
        if fields is not None and fields.prompt_targets is not None:
            prompt_scores = self._score_prompts(plan, fields, fields.prompt_targets, output)
        # Also for a step without results: the host must not run ahead of the device without bound.
        buffer = self._downloads.next(0 if tokens is None else tokens.nbytes)
        token_ids = None
        if tokens is not None:
            token_ids = buffer.memory[: tokens.nbytes].view(torch.int64).copy_(tokens, non_blocking=True).numpy()
        results = _Results(buffer, token_ids, scores, prompt_scores, all_scores)
        if tokens is not None:  # behind what the host waits for
            self._keep_tokens(sampled_rows[0], tokens)
            if not output.is_own_part:
                self._runner.spread_tokens()
        return results

    def _keep_tokens(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keeps the tokens of these rows for the next step, which may be under way before the host knows that there was
        none: its embedding needs an id."""
        self._last_tokens.index_copy_(0, rows, tokens.clamp(min=0))

    def _score_all(self, batch: ScheduledBatch, plan: StepPlan, logits: torch.Tensor) -> _AllScores | None:
        """Log-probabilities of the whole vocabulary for the sampled rows that want them; None: no request does."""
        if not self.state.flags.needs_all_logprobs:
            return None
        wanted = [row for row in plan.sampled.tolist() if batch.requests[row].params.logprobs == ALL_LOGPROBS]
        rows = np.array(wanted, dtype=np.int64)
        indices = upload(plan.token_indices[np.searchsorted(plan.sampled, rows)], logits.device)
        return rows, all_logprobs(logits.index_select(0, indices))

    def _score_prompts(
        self, plan: StepPlan, fields: StepFields[torch.Tensor], targets: torch.Tensor, output: LogitsProcessorOutput
    ) -> TokenLogprobs:
        """Log-probabilities of `targets` [N]; with the logits of a part of them at a time."""
        if fields.scored_indices is None or output.logits_of is None:
            return token_logprobs(output.next_token_logits, targets, plan.prompt_num_top)
        scored = fields.scored_indices.split(self._scored_at_once)
        parts = zip(scored, targets.split(self._scored_at_once * self._runner.num_deals), strict=True)
        return TokenLogprobs.concatenate(
            [token_logprobs(output.logits_of(part), wanted, plan.prompt_num_top) for part, wanted in parts]
        )

    def _follow_rows(self, batch: ScheduledBatch) -> None:
        """Bring the sampling state up to who holds which row; costs nothing while the requests stay the same."""
        if batch is self._followed or (batch.requests is self._seen_requests and not batch.admitted):
            return
        self._followed, self._seen_requests = batch, batch.requests
        gone = [row for row, owner in self._row_owners.items() if owner.is_finished or owner.row != row]
        for row in gone:
            self._grammars.leave(self._row_owners.pop(row))
            self.state.clear(row)
        for request in batch.admitted:
            self.state.set_request(
                request.row,
                request.params,
                request.prompt_token_ids,
                derive_seed(self._runner.config.runtime.seed, request.sequence),
                output_token_ids=request.output_token_ids,
                stop_ids=request.stop_ids if request.grammar is None else (),  # the grammar's mask forbids them
                bad_phrases=request.bad_phrases,
            )
            self._row_owners[request.row] = request
            self._grammars.admit(request)


_AllScores = tuple[np.ndarray, torch.Tensor]  # rows [F] of the step, and [F, V] of each


class _Results:
    """The results of a step, on their way to the host."""

    def __init__(
        self,
        buffer: StagingBuffer | Turn,
        tokens: np.ndarray | None,
        scores: TokenLogprobs | None,
        prompt_scores: TokenLogprobs | None = None,
        all_scores: _AllScores | None = None,
    ) -> None:
        """
        Args:
            buffer: the host's memory of the step.
            tokens: [S] int64, a part of it that is being written.
            all_scores: as _score_all gives them.
        """
        self._buffer = buffer
        self._tokens = tokens
        self._scores = None if scores is None else _download(scores)
        self._prompt_scores = None if prompt_scores is None else _download(prompt_scores)
        self._all_scores = None if all_scores is None else (all_scores[0], _to_host([all_scores[1]])[0])
        self._buffer.record()

    def tokens(self) -> np.ndarray | None:
        """The sampled tokens, once the copies are over; valid until the buffers come round."""
        self._buffer.wait()
        return self._tokens

    def fetch_all(self) -> dict[int, np.ndarray]:
        """Scores of the whole vocabulary by row of the step: [V] float32, to be kept. Called after `fetch`."""
        if self._all_scores is None:
            return {}
        rows, scores = self._all_scores
        # Copies: the whole step's pinned memory would stay with one of them.
        return {row: scores[index].numpy().copy() for index, row in enumerate(rows.tolist())}

    def fetch(self) -> tuple[np.ndarray | None, list[np.ndarray] | None, list[np.ndarray] | None]:
        """(sampled tokens, columns of their scores, columns of prompt scores), once the copies are over.

        The tokens are valid until the buffers come round.
        """
        tokens = self.tokens()
        scores, prompt_scores = (
            None if tensors is None else [tensor.numpy() for tensor in tensors]
            for tensors in (self._scores, self._prompt_scores)
        )
        return tokens, scores, prompt_scores


def _table(token_ids: np.ndarray | None, scores: Sequence[np.ndarray] | None, rows: np.ndarray) -> ScoreTable | None:
    """These rows of the scores of token_ids."""
    if token_ids is None or scores is None:
        return None
    return ScoreTable(token_ids[rows], *(column[rows] for column in scores))


def _download(scores: TokenLogprobs) -> list[torch.Tensor]:
    """Copies on the host in ScoreTable's order, in flight until the stream gets there; CPU tensors as they are."""
    return _to_host([scores.logprobs, scores.ranks, scores.top_token_ids, scores.top_logprobs])


def _to_host(columns: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        torch.empty(column.shape, dtype=column.dtype, pin_memory=True).copy_(column, non_blocking=True)
        if column.is_cuda
        else column
        for column in columns
    ]


def _read_in_place(restores: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(state rows, rest): the rows whose states requests at `rows` go on from, which need no copies of their own then,
    and those restores that are of other requests: admitted, but without tokens in the step.

    Args:
        restores: [N, 2], rows of prefixes' states and of requests.
    """
    if not restores.size:
        return rows, restores
    # Lists: of as few rows arrays take several times as long, and the GPU waits.
    sources = {row: source for source, row in restores.tolist()}
    state_rows = np.array([sources.pop(row, row) for row in rows.tolist()], dtype=rows.dtype)
    rest = [(source, row) for row, source in sources.items()]
    return state_rows, np.array(rest, dtype=restores.dtype) if rest else NO_COPIES
