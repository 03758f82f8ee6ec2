"""From logits to the next token of each row: batched, on the device, with no host sync and no per-request Python.

A row's logits get bias, penalties, forbidden tokens, and a grammar's mask. Then a greedy row takes the argmax. Another
row gets temperature, filters (logit_filters) and a draw that depends on the request's seed and position alone
(counter_rng). Every operation leaves rows that do not use it unchanged to the bit, so a row's token is the same in any
batch that gives it these logits.

A row whose logits hold NaN or inf, or nothing but -inf, gets NO_TOKEN; a row whose tokens are all forbidden gets
NONE_ALLOWED. It is found by the largest of its logits, and reaches the host in the token's place: nothing waits for it,
and no other row's token changes.

Ties: an argmax takes the lowest token id (the kernel's and numpy's do; torch.argmax on CUDA does, as tests check).

Shape legend: S rows to sample (rows of a prefill chunk are not passed in), V vocab, K alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mllm_compile.runtime.sampling.counter_rng import draw_tokens, padded_scores
from mllm_compile.runtime.sampling.logit_filters import filter_scores
from mllm_compile.runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from mllm_compile.runtime.sampling.params import GREEDY_TEMPERATURE, NO_TOKEN, NONE_ALLOWED
from mllm_compile.runtime.sampling.penalties import PenaltyParams, apply_penalties
from mllm_compile.runtime.sampling.scored import DrawScores
from mllm_compile.runtime.sampling.state import RowParams, SamplingFlags, SamplingState
from mllm_compile.runtime.sampling.token_masks import TokenMask

_PENALTY_ELEMENTS = 2**23  # logits penalised at a time: bounds what that takes beside them to about 150 MiB


@dataclass(frozen=True, kw_only=True)
class SamplerOutput:
    """Device tensors of one step.

    Attributes:
        token_ids: [S] int64, each under V, or NO_TOKEN or NONE_ALLOWED.
        logprobs: Of token_ids and flags.max_logprobs alternatives, by the modes of rows; None when flags.max_logprobs
            is.
        scores: The scores of the draw.
    """

    token_ids: torch.Tensor
    logprobs: TokenLogprobs | None
    scores: DrawScores


@dataclass(frozen=True)
class SamplingPieces:
    """The choice of tokens as kernels of the program, for its logits' width and type; see ops/tokens/greedy.py,
    ops/tokens/draw.py.

    Attributes:
        dtype: the type of the program's logits.
        greedy: (logits [S, V] of that type,) → ([S] int64,), NO_TOKEN among them as above; likewise the next two.
        from_logits: (logits [S, V] of that type, temperatures [S], seeds [S], positions [S]) → ([S] int64,).
        from_scores: (float32 scores [S, padded V], seeds, positions) → the same.
        score, score_floats: as ScorePieces has them.
    """

    dtype: torch.dtype
    greedy: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    from_logits: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    from_scores: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    score: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    score_floats: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class Sampler:
    """Chooses the tokens of a step; all it remembers is in the SamplingState that it is given.

    Attributes:
        pieces: the program's own kernels; None: torch's.
    """

    def __init__(self, pieces: SamplingPieces | None = None) -> None:
        self.pieces = pieces

    def __call__(
        self,
        logits: torch.Tensor,
        state: SamplingState,
        rows: torch.Tensor,
        flags: SamplingFlags,
        positions: torch.Tensor,
        mask: TokenMask | None = None,
        drafted: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample each row once, and count the tokens for penalties and bad_words.

        Greedy and plain temperature steps (no filters, nothing that changes logits) can be captured in a CUDA graph:
        call state.flush() before the capture and before each replay. A greedy step does nothing but _most_probable.

        Args:
            logits: [S, V] float32, bfloat16 or float16; not changed. Computed with in float32.
            state: Of the running requests; its counts change.
            rows: [S] int64: the request's row of each; row 0 for padding.
            flags: state.flags, or what covers them (the flags that a graph was captured with).
            positions: [S] int: tokens of each request so far, prompt and output (a decode step's seq_lens). It is the
                draw's counter, so a preempted and recomputed request draws the same tokens.
            mask: the tokens that grammars allow; None: no row has one.
            drafted: [S, K] int64, of a verify step: the drafted tokens that a row stands behind, NO_TOKEN behind them.
                Then the tokens are counted by `record_runs`, once it is known which are accepted.
        """
        token_ids, scores = self._choose(logits, state, rows, flags, positions, mask, drafted)
        if flags.changes_logits or mask is not None:
            are_forbidden = (token_ids == NO_TOKEN) & _is_finite(logits.amax(dim=-1))
            token_ids = torch.where(are_forbidden, NONE_ALLOWED, token_ids)
        logprobs = None
        if flags.max_logprobs is not None:
            scored, factors = state.scored(scores, rows)
            logprobs = token_logprobs(scored, token_ids, flags.max_logprobs, factors, self.pieces)
        return SamplerOutput(token_ids=token_ids, logprobs=logprobs, scores=scores)

    def _choose(
        self,
        logits: torch.Tensor,
        state: SamplingState,
        rows: torch.Tensor,
        flags: SamplingFlags,
        positions: torch.Tensor,
        mask: TokenMask | None,
        drafted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, DrawScores]:
        given, filtered = logits, None
        if flags.all_greedy and not flags.changes_logits:
            if flags.modes and flags.modes != ("raw_logprobs",):
                state.flush()
            logits = logits if mask is None else mask.forbid_others(logits)
            return _most_probable(self.pieces, logits), DrawScores(given, logits)
        state.flush()
        params = state.gather(rows)
        if flags.changes_logits:
            logits = _adjust(logits, state, params, flags, positions, drafted)
        if mask is not None:
            logits = mask.forbid_others(logits)
        if flags.all_greedy:
            token_ids = _most_probable(self.pieces, logits)
        else:
            token_ids, filtered = _draw(
                self.pieces,
                logits,
                params.temperature,
                params.top_k if flags.needs_top_k else None,
                params.top_p if flags.needs_top_p else None,
                params.log_min_p if flags.needs_min_p else None,
                params.seed,
                positions,
            )
            if flags.any_greedy:
                token_ids = torch.where(params.is_greedy != 0, _most_probable(self.pieces, logits), token_ids)
        if flags.needs_penalties and drafted is None:
            state.counts.record(params.count_row, token_ids.clamp(min=0))
        if flags.needs_bad_words and drafted is None:
            state.phrases.record(params.rows, token_ids.clamp(min=0))
        return token_ids, DrawScores(given, logits, filtered)

    def record_runs(
        self,
        state: SamplingState,
        rows: torch.Tensor,
        flags: SamplingFlags,
        token_ids: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """Count the tokens of a verify step for penalties and bad_words.

        Args:
            rows: [Q] int64, each once or 0.
            token_ids, counts: as AcceptedTokens has them.
        """
        if flags.needs_penalties:
            columns = torch.arange(token_ids.shape[1], device=rows.device)
            count_rows = state.gather(rows).count_row[:, None]
            count_rows = torch.where(columns < counts[:, None], count_rows, 0)
            state.counts.record(count_rows.flatten(), token_ids.clamp(min=0).flatten())
        if flags.needs_bad_words:
            state.phrases.record_runs(rows, token_ids.clamp(min=0), counts)


def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ps: torch.Tensor | None,
    top_ks: torch.Tensor | None,
    penalty_params: PenaltyParams | None,
    *,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    pieces: SamplingPieces | None = None,
) -> torch.Tensor:
    """The same kernels on parameters given as tensors: what ModelRunner.sample is made of. It counts no tokens.

    Args:
        logits: [S, V], any float dtype; not changed.
        temperatures: [S] float32; under 1e-5: greedy.
        top_ps: [S] float32 in (0, 1], 1: off; None: off for all.
        top_ks: [S] int, 0: off; None: off for all.
        penalty_params: Penalties and token counts of the rows; None: none.
        seeds, positions: [S] int; None: seeds from torch's default generator of the device, position 0.
        pieces: the program's own kernels; None: torch's.

    Returns:
        [S] int32, each under V, or NO_TOKEN.
    """
    if penalty_params is not None:
        logits = logits.to(torch.float32, copy=True)
        apply_penalties(logits, penalty_params)
    if seeds is None:
        seeds = torch.randint(2**63 - 1, logits.shape[:1], device=logits.device)
    if positions is None:
        positions = torch.zeros_like(seeds)
    is_greedy = temperatures < GREEDY_TEMPERATURE
    drawn, _ = _draw(
        pieces,
        logits,
        torch.where(is_greedy, 1.0, temperatures),
        top_ks,
        top_ps,
        None,
        seeds,
        positions,
    )
    return torch.where(is_greedy, _most_probable(pieces, logits), drawn).to(torch.int32)


def _adjust(
    logits: torch.Tensor,
    state: SamplingState,
    params: RowParams,
    flags: SamplingFlags,
    positions: torch.Tensor,
    drafted: torch.Tensor | None,
) -> torch.Tensor:
    """A float32 copy of the logits with bias and penalties, -inf for what is forbidden. [S, V] → [S, V]."""
    adjusted = logits.to(torch.float32, copy=True)
    if flags.needs_bias:
        state.biases.add_to(adjusted, params.rows)
    if flags.needs_penalties:
        num_rows = max(1, _PENALTY_ELEMENTS // logits.shape[1])
        for start in range(0, logits.shape[0], num_rows):
            _penalise(adjusted, state, params, slice(start, start + num_rows), drafted)
    if flags.needs_min_tokens:
        state.forbidden.add_to(adjusted, params.rows, positions < params.min_tokens_end)
    if flags.needs_allowed:
        state.allowed.forbid_others(adjusted, params.rows)
    if flags.needs_bad_words:
        state.phrases.forbid(adjusted, params.rows, drafted)
    return adjusted


def _penalise(
    logits: torch.Tensor, state: SamplingState, params: RowParams, part: slice, drafted: torch.Tensor | None
) -> None:
    """Apply the penalties to these rows of float32 logits, in place."""
    histories = state.counts.gather(params.count_row[part])
    if drafted is not None:
        histories.add(drafted[part])
    penalties = PenaltyParams(
        repetition_penalties=params.repetition_penalty[part],
        frequency_penalties=params.frequency_penalty[part],
        presence_penalties=params.presence_penalty[part],
        token_histories=histories,
    )
    apply_penalties(logits[part], penalties)


def _most_probable(pieces: SamplingPieces | None, logits: torch.Tensor) -> torch.Tensor:
    """The lowest id of each row's largest logit, or NO_TOKEN. [S, V] → [S] int64."""
    if pieces is None or logits.dtype != pieces.dtype:
        token_ids = _argmax(logits)  # to which NaN is the largest
        largest = logits.gather(1, token_ids[:, None]).squeeze(1)
        return torch.where(_is_finite(largest), token_ids, NO_TOKEN)
    return pieces.greedy([logits.contiguous()])[0]


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id of each row's largest logit: [S, V] → [S] int64. On a CPU by numpy, as torch takes fifteen times as
    long."""
    if not logits.is_cpu:
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.float().numpy().argmax(axis=-1))


def _draw(
    pieces: SamplingPieces | None,
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    log_min_ps: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One token a row from what temperature and filters leave, or NO_TOKEN; and DrawScores.filtered.
    [S, V] → [S] int64."""
    is_filtered = top_ks is not None or top_ps is not None or log_min_ps is not None
    # Logits with penalties or biases are float32, whatever the type of the program's own logits is.
    if pieces is not None and not is_filtered and logits.dtype == pieces.dtype:
        return pieces.from_logits([logits.contiguous(), temperatures.float(), seeds.long(), positions.long()])[0], None
    scores = padded_scores(logits, temperatures)
    has_token = _is_finite(scores.amax(dim=-1))  # of NaN torch makes NaN
    if is_filtered:
        # Filters may drop NaN and inf, or search for ever among them.
        scores.masked_fill_(~has_token[:, None], 0.0)
        scores = filter_scores(scores, top_ks, top_ps, log_min_ps)
    if pieces is None:
        drawn = draw_tokens(scores, seeds, positions)
    else:
        drawn = pieces.from_scores([scores, seeds.long(), positions.long()])[0]
    return torch.where(has_token, drawn, NO_TOKEN), scores if is_filtered else None


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    """True where neither NaN nor infinite, in two kernels where isfinite takes four."""
    return values.abs() < torch.inf
