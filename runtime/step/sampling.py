"""The choice of a step's tokens: sampling parameters, grammars and last tokens of the rows, and scores.

Sampled ids stay on the device, where the next step's decodes read them; the host gets a copy when it asks.

Shape legend: S sampled rows, N prompt positions, V vocab.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from mllm_compile.runtime.config_sections import LEAST_ROWS
from mllm_compile.runtime.device.staging import StagingRing
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import LogitsProcessorOutput
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.ranks.records import SamplingMode
from mllm_compile.runtime.sampling.acceptance import AcceptedTokens, accept, accept_synthetically, drafted_before
from mllm_compile.runtime.sampling.counter_rng import derive_seed
from mllm_compile.runtime.sampling.logprobs import TokenLogprobs, all_logprobs, token_logprobs
from mllm_compile.runtime.sampling.params import ALL_LOGPROBS, NO_TOKEN, SamplingParams
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.sampling.scored import DrawScores, packed_bits
from mllm_compile.runtime.sampling.token_masks import TokenMask, TokenMasks
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.grammar_rows import GrammarRows, SampledStep
from mllm_compile.runtime.step.plan import RunPlan, StepPlan
from mllm_compile.runtime.step.results import ForSome, SampledScores, StepHandle, StepResults
from mllm_compile.runtime.step_fields import StepFields

if TYPE_CHECKING:
    from mllm_compile.runtime.cuda_graph.verifies import CapturedVerify
    from mllm_compile.runtime.cuda_graph.verify_loop import VerifyLoop

_SCORED_LOGITS = 2**26  # of prompt positions at a time: 128 MiB in 16 bits, however long the prompts are


class StepSampling:
    """Follows the requests that hold rows, and chooses the tokens of steps. Used by one thread.

    Attributes:
        state: sampling parameters of the requests that hold a row.
        scored_at_once: prompt positions of each rank whose logits are made at a time.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner, self._sampler = runner, sampler
        self.state = runner.row_state.sampling
        with torch.inference_mode(), runner.on_device():
            self.state.clear_all()
        self._last_tokens = runner.row_state.last_tokens
        num_rows = self._last_tokens.shape[0]
        self._downloads = StagingRing(runner.device)
        at_once = max(1, _SCORED_LOGITS // runner.vocab_size // runner.dp_size)
        self.scored_at_once = at_once if at_once < LEAST_ROWS else at_once // LEAST_ROWS * LEAST_ROWS
        self._row_owners: dict[int, Request] = {}  # requests whose parameters are in `state`
        most_drafted = runner.config.speculative.most_drafted_of(runner.config.runtime.max_running_requests)
        most_masks = num_rows + runner.dp_size * most_drafted
        self._grammars = GrammarRows(lambda: TokenMasks(most_masks, runner.vocab_size, runner.device))
        self._previous: SampledStep | None = None  # the last step, if a request in a row has a grammar
        # The last batches', as many as take turns: each promises the very same list while no request comes or goes.
        self._seen_requests: deque[list[Request]] = deque(maxlen=runner.config.runtime.pipeline_parallel_size)
        self._followed: ScheduledBatch | None = None  # the batch whose requests are in the sampling state

    # Ahead of a step --------------------------------------------------------------------------------------------------

    def follow_rows(self, batch: ScheduledBatch) -> None:
        """Bring the sampling state up to the requests that hold rows; free while they stay the same."""
        is_seen = any(batch.requests is seen for seen in self._seen_requests)
        if batch is self._followed or (is_seen and not batch.admitted):
            return
        self._followed = batch
        self._seen_requests.append(batch.requests)
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
                default_mode=self._runner.config.runtime.logprobs_mode,
            )
            self._row_owners[request.row] = request
            self._grammars.admit(request)

    def choice(self, batch: ScheduledBatch, plan: StepPlan) -> SamplingMode:
        """How ranks come to the step's tokens."""
        if self._runner.pipeline is not None:
            return SamplingMode.SAMPLED
        self.follow_rows(batch)
        flags = self.state.flags
        if self._grammars or not flags.chooses_plainly:
            return SamplingMode.SAMPLED
        has_all = self._runner.dp_size == 1 and plan.fields.prompt_targets is None and not batch.has_drafts
        return SamplingMode.GREEDY_ACROSS_RANKS if flags.takes_largest and has_all else SamplingMode.IN_GRAPH

    def take_last_tokens(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Puts the newest tokens of these rows where a step reads its input ids."""
        torch.index_select(self._last_tokens, 0, rows, out=out)

    # Behind the model -------------------------------------------------------------------------------------------------

    def mask(self, batch: ScheduledBatch, plan: StepPlan) -> TokenMask | None:
        """The mask of the step, whose forward was launched; waits for the step before if any request has a grammar."""
        return self._grammars.mask(batch, plan, self._previous) if self._grammars else None

    def sample(
        self,
        batch: ScheduledBatch,
        plan: StepPlan,
        output: LogitsProcessorOutput,
        sampled_rows: tuple[torch.Tensor, torch.Tensor],
        fields: StepFields[torch.Tensor] | None = None,
        *,
        mask: TokenMask | None,
    ) -> StepResults:
        """Chooses the tokens of `sampled_rows` (StepFields.sampled); scores prompts, which need `fields`."""
        tokens = prompt_scores = accepted = None
        scores = SampledScores()
        logits = output.next_token_logits
        if plan.sampled.size:
            rows, positions = sampled_rows
            if output.is_partial_vocab:
                tokens = self._runner.greedy_across_ranks(output)
            else:
                drafted = self._drafted_before(plan, fields, rows.shape[0])
                sampled = self._sampler(logits, self.state, rows, self.state.flags, positions, mask, drafted)
                tokens = sampled.token_ids
                scores = self._scores(batch, plan, sampled.logprobs, sampled.scores, rows)
        kept_rows, newest = sampled_rows[0], tokens
        if tokens is not None and plan.runs is not None and fields is not None:
            kept_rows, accepted = self._accept(plan.runs, fields, sampled_rows, tokens, mask)
            newest, tokens = accepted.newest, accepted.packed()
            self._sampler.record_runs(self.state, kept_rows, self.state.flags, accepted.token_ids, accepted.counts)
        if fields is not None and fields.prompt_targets is not None:
            prompt_scores = self._score_prompts(plan, fields, fields.prompt_targets, output)
        # Also for a step without results: the host must not run ahead of the device without bound.
        buffer = self._downloads.next(0 if tokens is None else tokens.nbytes)
        token_ids = None
        if tokens is not None:
            token_ids = buffer.memory[: tokens.nbytes].view(torch.int64).copy_(tokens, non_blocking=True).numpy()
        results = StepResults(buffer, token_ids, scores, prompt_scores)
        if newest is not None:  # behind what the host waits for
            self._keep_tokens(kept_rows, newest)
            if not output.is_partial_vocab:
                self._runner.share_tokens(plan.fields.sampled[0])
        if accepted is not None:
            self._runner.keep_states(accepted.counts)
        return results

    def sample_captured(
        self, batch: ScheduledBatch, plan: StepPlan, step: CapturedVerify, loop: VerifyLoop, mask: TokenMask | None
    ) -> SampledScores:
        """Chooses the tokens of a captured verify step in place of its graph, and accepts by them; their scores."""
        assert plan.runs is not None, "the plan of a verify step"
        flags, width = self.state.flags, plan.runs.places.shape[1]
        places = torch.arange(step.rows.shape[0], device=step.rows.device).view(-1, width)
        count = places.shape[0]
        drafted = None
        if flags.needs_penalties or flags.needs_bad_words:
            drafted = drafted_before(places, loop.draft_ids(count, places.shape[1] - 1), places.numel())
        sampled = self._sampler(step.logits, self.state, step.rows, flags, step.seq_lens, mask, drafted)
        tokens = sampled.token_ids.view(places.shape)
        draft_ids = None if mask is None else mask.draft_ids
        if draft_ids is not None and len(draft_ids) < count:  # requests have places in blocks
            at = upload(plan.token_indices[::width] // width, draft_ids.device)
            draft_ids = draft_ids.new_full((count, width - 1), NO_TOKEN).index_copy_(0, at, draft_ids)
        accepted = loop.accept(tokens, draft_ids)
        self._sampler.record_runs(self.state, step.rows[places[:, 0]], flags, *accepted)
        return self._scores(batch, plan, sampled.logprobs, sampled.scores, step.rows)

    def score(
        self, batch: ScheduledBatch, plan: StepPlan, logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor
    ) -> SampledScores:
        """Scores of tokens [S] that a graph has chosen of logits [S, V], as far as the requests of `rows` want them."""
        most = self.state.flags.max_logprobs
        if most is None:
            return SampledScores()
        scores = DrawScores(logits, logits)  # a graph chooses plainly
        scored, factors = self.state.scored(scores, rows)
        table = token_logprobs(scored, tokens, most, factors, self._sampler.pieces)
        return self._scores(batch, plan, table, scores, rows)

    def follow(self, plan: StepPlan, output: LogitsProcessorOutput, fields: StepFields[torch.Tensor]) -> None:
        """Launches what ranks do together behind the model, on a rank that follows."""
        if fields.scored_indices is not None and output.logits_of is not None:
            for part in fields.scored_indices.split(self.scored_at_once):
                output.logits_of(part)
        if plan.sampled.size and output.is_partial_vocab:
            self._keep_tokens(fields.sampled[0], self._runner.greedy_across_ranks(output))
        elif plan.sampled.size:
            self._runner.share_tokens(plan.fields.sampled[0])
        if plan.runs is not None:
            self._runner.keep_states(
                torch.empty(plan.runs.requests.size, dtype=torch.int64, device=self._last_tokens.device)
            )

    def _scores(
        self,
        batch: ScheduledBatch,
        plan: StepPlan,
        table: TokenLogprobs | None,
        scores: DrawScores,
        rows: torch.Tensor,
    ) -> SampledScores:
        """The table, and what is of the whole vocabulary, for the sampled rows that want it."""
        flags, of_all, kept = self.state.flags, None, None
        if flags.needs_all_logprobs:
            scored, factors = self.state.scored(scores, rows)
            wanted, part = _rows_of(batch, plan, scored, lambda params: params.logprobs == ALL_LOGPROBS)
            if factors is not None:
                factors = _rows_of(batch, plan, factors, lambda params: params.logprobs == ALL_LOGPROBS)[1]
            of_all = wanted, all_logprobs(part, factors, self._sampler.pieces)
        if flags.needs_masks and scores.filtered is not None:
            filtered = scores.filtered[:, : scores.logits.shape[1]]
            wanted, part = _rows_of(batch, plan, filtered, lambda params: params.has_sampling_mask)
            kept = wanted, packed_bits(part > -torch.inf)
        return SampledScores(table, of_all, kept)

    def launched(self, handle: StepHandle) -> None:
        """Notes the step that was launched last."""
        self._previous = handle if self._grammars else None

    def _drafted_before(
        self, plan: StepPlan, fields: StepFields[torch.Tensor] | None, num_rows: int
    ) -> torch.Tensor | None:
        """Makes the drafted tokens that Sampler takes; None: there are no drafts, or no request looks at its output."""
        flags = self.state.flags
        if plan.runs is None or fields is None or not (flags.needs_penalties or flags.needs_bad_words):
            return None
        return drafted_before(*_runs_of(plan.runs, fields), num_rows)

    def _accept(
        self,
        runs: RunPlan,
        fields: StepFields[torch.Tensor],
        sampled_rows: tuple[torch.Tensor, torch.Tensor],
        tokens: torch.Tensor,
        mask: TokenMask | None,
    ) -> tuple[torch.Tensor, AcceptedTokens]:
        """The rows of a verify step's requests [Q], and what of their drafts is accepted."""
        places, draft_ids = _runs_of(runs, fields)
        if mask is not None and mask.draft_ids is not None:
            draft_ids = mask.draft_ids
        rows, positions = (values[places[:, 0]] for values in sampled_rows)
        length = self._runner.config.speculative.synthetic_acceptance_length
        if length is None:
            return rows, accept(tokens[places], draft_ids)
        self.state.flush()
        seeds = self.state.gather(rows).seed
        return rows, accept_synthetically(tokens[places], draft_ids, length, seeds, positions)

    def _keep_tokens(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keeps the tokens of these rows for the next step.

        That may be under way before the host knows that a row has no token: its embedding needs an id.
        """
        self._last_tokens.index_copy_(0, rows, tokens.clamp(min=0))

    def _score_prompts(
        self, plan: StepPlan, fields: StepFields[torch.Tensor], targets: torch.Tensor, output: LogitsProcessorOutput
    ) -> TokenLogprobs:
        """Log-probabilities of `targets` [N]; with the logits of a part of them at a time."""
        pieces = self._sampler.pieces
        if fields.scored_indices is None or output.logits_of is None:
            return token_logprobs(output.next_token_logits, targets, plan.prompt_num_top, pieces=pieces)
        scored = fields.scored_indices.split(self.scored_at_once)
        parts = zip(scored, targets.split(self.scored_at_once * self._runner.dp_size), strict=True)
        return TokenLogprobs.concatenate(
            [
                token_logprobs(output.logits_of(part), wanted, plan.prompt_num_top, pieces=pieces)
                for part, wanted in parts
            ]
        )


def _rows_of(
    batch: ScheduledBatch, plan: StepPlan, values: torch.Tensor, is_wanted: Callable[[SamplingParams], bool]
) -> ForSome:
    """The sampled tokens whose requests want it, and their rows of values [S, …]."""
    wanted = np.flatnonzero([is_wanted(batch.requests[row].params) for row in plan.sampled.tolist()])
    return wanted, values.index_select(0, upload(plan.token_indices[wanted], values.device))


def _runs_of(runs: RunPlan, fields: StepFields[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """RunPlan's places, among the rows of logits, and draft_ids on the device."""
    assert fields.run_indices is not None and fields.draft_ids is not None, "a plan with runs has both"
    return fields.run_indices.view(runs.places.shape), fields.draft_ids.view(runs.draft_ids.shape)
