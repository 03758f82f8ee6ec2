"""Sampling parameters of the running requests: a row a request on the device, and host flags of what is in use.

The step runner calls set_request at an admission and clear at a release; a step itself only gathers rows. Flags come
from counts of features over the rows, kept as requests come and go: reading them costs the same whatever runs.

Shape legend: S rows of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mllm_compile.runtime.config_sections import LOGPROBS_MODES, LogprobsMode
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.lora.rows import AdapterRows
from mllm_compile.runtime.sampling.params import ALL_LOGPROBS, SamplingParams
from mllm_compile.runtime.sampling.penalties import TokenCounts
from mllm_compile.runtime.sampling.scored import DrawScores
from mllm_compile.runtime.sampling.token_rules import AllowedTokens, ForbiddenPhrases, TokenBiases

# Parameters in two tables, and what those hold for a row without a request: greedy, everything off. Temperature and
# seed are first: what is gathered of the first parameter is aligned as kernels of the program want it.
_NEUTRAL_FLOATS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "log_min_p": -math.inf,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
_NEUTRAL_INTS = {"seed": 0, "top_k": 0, "min_tokens_end": 0, "count_row": 0, "is_greedy": 1}
# Where the kernels of ops/tokens/decode_loop.py find what they read of the tables.
NUM_FLOATS, NUM_INTS = len(_NEUTRAL_FLOATS), len(_NEUTRAL_INTS)
TEMPERATURE = list(_NEUTRAL_FLOATS).index("temperature")
SEED, IS_GREEDY = (list(_NEUTRAL_INTS).index(name) for name in ("seed", "is_greedy"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFlags:
    """The features that some running request uses: they decide which operations a step has, never a row's result.

    `max_logprobs` is the most alternatives that a request wants, None when none wants log-probabilities; `modes` are
    of the requests that do. The step runner computes log-probabilities of the whole vocabulary (`needs_all_logprobs`),
    and kept tokens (`needs_masks`), for the rows that want them alone.
    The default is a greedy step; SamplingFlags(all_greedy=False) serves any mix of greedy and plain temperature rows.
    """

    all_greedy: bool = True
    any_greedy: bool = True
    needs_bias: bool = False
    needs_penalties: bool = False
    needs_min_tokens: bool = False
    needs_allowed: bool = False
    needs_bad_words: bool = False
    needs_top_k: bool = False
    needs_top_p: bool = False
    needs_min_p: bool = False
    max_logprobs: int | None = None
    modes: tuple[LogprobsMode, ...] = ()
    needs_all_logprobs: bool = False
    needs_masks: bool = False

    @property
    def needs_filters(self) -> bool:
        """True if some row draws from a part of the vocabulary."""
        return self.needs_top_k or self.needs_top_p or self.needs_min_p

    @property
    def chooses_plainly(self) -> bool:
        """True if every row takes the most probable token or draws by a temperature alone, as captured decodes do."""
        return not (self.needs_filters or self.changes_logits)

    @property
    def takes_largest(self) -> bool:
        """True if every row takes the most probable token, and nothing is asked of the others."""
        return self.all_greedy and not self.changes_logits and self.max_logprobs is None

    @property
    def changes_logits(self) -> bool:
        """True if some row's largest logit may become another one."""
        is_restricted = self.needs_min_tokens or self.needs_allowed or self.needs_bad_words
        return self.needs_bias or self.needs_penalties or is_restricted


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParams:
    """Parameters of a step's rows, each [S] on the device; unused ones are neutral (see the neutral tables).

    Attributes:
        temperature: 1 for a greedy row, so that dividing by it is always right.
        log_min_p: log(min_p), -inf when off.
        min_tokens_end: The first position where the request may end: prompt length + min_tokens.
        count_row: Row of TokenCounts; 0 for a request without penalties.
        is_greedy: 1 or 0.
    """

    rows: torch.Tensor  # int64
    temperature: torch.Tensor  # float32, and so the next five
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    seed: torch.Tensor  # int64, and so the next four
    top_k: torch.Tensor
    min_tokens_end: torch.Tensor
    count_row: torch.Tensor
    is_greedy: torch.Tensor


class SamplingState:
    """The tensors that Sampler gathers from, and `flags`, made anew when they are asked for after a change.

    Rows without a request (0, the padding row of captured graphs, among them) are greedy and neutral. The parameter
    tables keep their addresses, so a captured graph may gather from them; call flush() before each replay.

    Attributes:
        biases, forbidden: logit_bias, and the ids that min_tokens forbids, by row.
        allowed, phrases: allowed_token_ids, and the tokens of bad_words, by row.
        counts: Token counts of the requests with penalties, by count row.
    """

    def __init__(self, max_reqs: int, vocab_size: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._flags: SamplingFlags | None = SamplingFlags()  # None: to be made anew
        self.biases = TokenBiases(max_reqs, self.device)
        self.forbidden = TokenBiases(max_reqs, self.device)
        self.allowed = AllowedTokens(max_reqs, vocab_size, self.device)
        self.phrases = ForbiddenPhrases(max_reqs, self.device)
        self.counts = TokenCounts(vocab_size, self.device)
        self._host_floats = np.tile(np.array(list(_NEUTRAL_FLOATS.values()), np.float32), (max_reqs, 1))
        self._host_ints = np.tile(np.array(list(_NEUTRAL_INTS.values()), np.int64), (max_reqs, 1))
        # [parameters, rows]: what is gathered of one parameter is contiguous, as kernels want it.
        self._floats = upload(_transposed(self._host_floats), self.device)
        self._ints = upload(_transposed(self._host_ints), self.device)
        self._is_stale = False  # the host tables have changed since the last flush
        self._active: dict[int, tuple[SamplingParams, list[str]]] = {}  # with its features
        self._uses: Counter[str] = Counter()  # feature → active rows that use it
        self._num_logprobs: Counter[int] = Counter()  # alternatives → active rows that want as many
        self._num_modes: Counter[LogprobsMode] = Counter()  # mode → active rows that want log-probabilities by it
        self._host_modes = np.zeros(max_reqs, np.int64)  # index into LOGPROBS_MODES
        self._modes = upload(self._host_modes.copy(), self.device)

    def set_request(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        default_seed: int,
        *,
        output_token_ids: Sequence[int] = (),
        stop_ids: Collection[int] = (),
        bad_phrases: Sequence[Sequence[int]] = (),
        default_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        """Take over the parameters of a request that was admitted, or re-admitted after a preemption.

        Numbers reach the device with the next flush, all requests in one copy.

        Args:
            row: The request's row; what it held before is cleared.
            params: Of the request.
            prompt_token_ids: The prompt alone, however much of it is recomputed.
            default_seed: Used when params.seed is None; the same at a re-admission, or the request's draws change:
                counter_rng.derive_seed(the engine's seed, a number that stays the request's own).
            output_token_ids: Already generated, when it was preempted; penalties and bad_words look at them.
            stop_ids: Tokens that min_tokens forbids: stop_token_ids, and end-of-sequence unless it is ignored.
            bad_phrases: The tokens of params.bad_words, none of them empty.
            default_mode: Used when params.logprobs_mode is None.
        """
        if row in self._active:
            self._release(row)
        is_greedy = params.is_greedy
        count_row = self.counts.allocate(prompt_token_ids, output_token_ids) if params.has_penalties else 0
        self._host_floats[row] = (
            1.0 if is_greedy else params.temperature,
            1.0 if is_greedy else params.top_p,
            math.log(params.min_p) if params.min_p > 0 and not is_greedy else -math.inf,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        seed = default_seed if params.seed is None else params.seed
        top_k = 0 if is_greedy else params.top_k
        self._host_ints[row] = (seed, top_k, len(prompt_token_ids) + params.min_tokens, count_row, is_greedy)
        features = _features(params)
        self._active[row] = params, features  # from here on what fails is taken back when the row has another request
        for feature in features:
            self._uses[feature] += 1
        if params.logprobs is not None:
            self._num_logprobs[max(params.logprobs, 0)] += 1
            mode = params.logprobs_mode or default_mode
            self._num_modes[mode] += 1
            self._host_modes[row] = LOGPROBS_MODES.index(mode)
        self._changed()
        if params.logit_bias is not None:
            self.biases.set(row, params.logit_bias)
        if params.min_tokens > 0:
            self.forbidden.set(row, dict.fromkeys(sorted(stop_ids), -math.inf))
        if params.allowed_token_ids is not None:
            self.allowed.set(row, params.allowed_token_ids)
        if params.bad_words:
            self.phrases.set(row, bad_phrases, output_token_ids)

    def clear(self, row: int) -> None:
        """Clears a row whose request is over or preempted. A step of it that still runs or is queued is harmless."""
        self._release(row)
        self._changed()

    def clear_all(self) -> None:
        """Like clear, for every row that has a request."""
        for row in list(self._active):
            self.clear(row)

    def flush(self) -> None:
        """Bring the device tables up to date; does nothing when no request has come or gone.

        Raises:
            RuntimeError: There are changes while a CUDA graph is being captured: each replay would repeat their copy.
        """
        if not self._is_stale:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "sampling state: expected no changed requests while a CUDA graph is captured, got some; "
                "call SamplingState.flush() before the capture."
            )
        self._floats.copy_(upload(_transposed(self._host_floats), self.device))
        self._ints.copy_(upload(_transposed(self._host_ints), self.device))
        if len(self.flags.modes) > 1:
            self._modes.copy_(upload(self._host_modes.copy(), self.device))
        self._is_stale = False

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[NUM_FLOATS, rows] float32 and [NUM_INTS, rows] int64, as of the last flush; always these tensors."""
        return self._floats, self._ints

    def gather(self, rows: torch.Tensor) -> RowParams:
        """Parameters of these rows, as the last flush left them. rows: [S] int64."""
        floats = dict(zip(_NEUTRAL_FLOATS, self._floats[:, rows].unbind(0), strict=True))
        ints = dict(zip(_NEUTRAL_INTS, self._ints[:, rows].unbind(0), strict=True))
        return RowParams(rows=rows, **floats, **ints)

    def scored(self, scores: DrawScores, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores that log-probabilities of these rows are of, and their factors, as DrawScores.of_modes has them.
        Rows [S] int64, as of the last flush."""
        modes = self.flags.modes
        if modes == ("raw_logprobs",):
            return scores.logits, None
        return scores.of_modes(modes, self._modes[rows], self._floats[TEMPERATURE][rows])

    def _release(self, row: int) -> None:
        params, features = self._active.pop(row)
        for feature in features:
            self._uses[feature] -= 1
        if params.logprobs is not None:
            self._num_logprobs[max(params.logprobs, 0)] -= 1
            self._num_modes[LOGPROBS_MODES[self._host_modes[row]]] -= 1
            self._host_modes[row] = 0
        if params.has_penalties:
            self.counts.free(int(self._host_ints[row, list(_NEUTRAL_INTS).index("count_row")]))
        if params.logit_bias is not None:
            self.biases.set(row, {})
        if params.min_tokens > 0:
            self.forbidden.set(row, {})
        if params.allowed_token_ids is not None:
            self.allowed.clear(row)
        if params.bad_words:
            self.phrases.set(row, ())
        self._host_floats[row] = list(_NEUTRAL_FLOATS.values())
        self._host_ints[row] = list(_NEUTRAL_INTS.values())

    def _changed(self) -> None:
        self._is_stale = True
        self._flags = None

    @property
    def flags(self) -> SamplingFlags:
        """The features that active rows use."""
        if self._flags is None:
            self._flags = self._count_flags()
        return self._flags

    def _count_flags(self) -> SamplingFlags:
        uses = self._uses
        return SamplingFlags(
            all_greedy=not uses["random"],
            any_greedy=uses["greedy"] > 0,
            needs_bias=uses["bias"] > 0,
            needs_penalties=uses["penalties"] > 0,
            needs_min_tokens=uses["min_tokens"] > 0,
            needs_allowed=uses["allowed"] > 0,
            needs_bad_words=uses["bad_words"] > 0,
            needs_top_k=uses["top_k"] > 0,
            needs_top_p=uses["top_p"] > 0,
            needs_min_p=uses["min_p"] > 0,
            max_logprobs=max((number for number, rows in self._num_logprobs.items() if rows), default=None),
            modes=tuple(mode for mode in LOGPROBS_MODES if self._num_modes[mode]),
            needs_all_logprobs=uses["all_logprobs"] > 0,
            needs_masks=uses["masks"] > 0,
        )


def _transposed(table: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(table.T)


def _features(params: SamplingParams) -> list[str]:
    """The features of a step that this request needs. Filters keep the likeliest token, so a greedy one has none."""
    is_random = not params.is_greedy
    used = {
        "random": is_random,
        "greedy": params.is_greedy,
        "bias": params.logit_bias is not None,
        "penalties": params.has_penalties,
        "min_tokens": params.min_tokens > 0,
        "allowed": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "all_logprobs": params.logprobs == ALL_LOGPROBS,
        "masks": params.has_sampling_mask,
        "top_k": is_random and params.top_k > 0,
        "top_p": is_random and params.top_p < 1,
        "min_p": is_random and params.min_p > 0,
    }
    return [feature for feature, is_used in used.items() if is_used]


class RowState:
    """The tensors of the table's rows, always the same: captured graphs read and write them.

    Attributes:
        last_tokens: [rows] int64, the newest token of each.
        sampling: their sampling parameters.
        adapters: their adapters, of a model that takes some.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, sampling: SamplingState | None = None
    ) -> None:
        """
        Args:
            sampling: another model's, of the same rows; None: a new one.
        """
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.sampling = SamplingState(num_rows, vocab_size, device) if sampling is None else sampling
        self.adapters: AdapterRows | None = None
