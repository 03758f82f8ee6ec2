"""The scheduler's output to the step runner (ScheduledBatch), and its result once tokens are known (UpdateResult).

Shape legend: R requests of the step in row order, decodes first; N pages newly written to page tables; T_prefill
tokens of the rows after the decodes; K most tokens of a draft. All arrays are numpy on the host. Free of torch.
memory_pool.py says what a row, a slot and a page are, and docs/glossary.md what vLLM and SGLang call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mllm_compile.runtime.schedule.request import Request

NO_DRAFTS = np.empty(0, dtype=np.int64)
NO_DRAFTS.setflags(write=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScheduledBatch:
    """One step's work. Never change its arrays or lists: a steady batch shares them with the steps before and after.

    While the set of decoding requests stays the same, `requests`, `rows`, `num_new`, `sample_mask`, `rope_lens`,
    `adapter_slots` and `prompt_logprob_rows` of decode-only batches are the very same objects. So derived data
    (sampling flags, uploaded row indices) may be kept as long as `batch.requests is previous.requests`.

    A decode row's input id is the last token sampled for that row, which is on the device and perhaps nowhere else.
    Page writes come before anything reads the page table; they concern rows of this batch, and of requests that are
    admitted in it. A request may be admitted without tokens in the step: it waits for room for its image.
    """

    step_id: int  # 0, 1, 2, … one per batch; steps run, and are updated, in this order
    requests: list[Request]
    rows: np.ndarray  # [R] int32: the requests' rows of ReqToTokenPool, each ≥ 1
    num_new: np.ndarray  # [R] int32: tokens computed in this step; 1 for a decode, and one for each of its draft
    prefix_lens: np.ndarray  # [R] int32: tokens already in the KV; new token j of a row has position prefix_len + j
    num_decodes: int  # the first rows
    num_tokens: int  # sum of num_new
    # Those of decodes begin with a new token: captured ones know them by its slot.
    page_rows: np.ndarray  # [N] int32: row of each page write (cached pages of newly admitted requests are among them)
    page_positions: np.ndarray  # [N] int32: index of the page within its row
    page_ids: np.ndarray  # [N] int32
    cleared_pages: np.ndarray  # int32: pages to zero before the step: they held NaN or inf
    prefill_token_ids: np.ndarray  # [T_prefill] int64: input ids of rows num_decodes…R-1, one after another
    sample_mask: np.ndarray  # [R] bool: False for a chunk that does not reach the end of its tokens
    rope_lens: np.ndarray  # [R] int32: Request.rope_len of rows with prompt tokens, 0 of decodes
    adapter_slots: np.ndarray  # [R] int32: Request.adapter_slot
    prompt_logprob_rows: np.ndarray  # [R] bool: logits of every new token of the row are wanted, not of the last alone
    # Requests that got their row in this step, new and resumed ones: (re)make the row's sampling state from
    # prompt_token_ids and output_token_ids before sampling.
    admitted: list[Request]
    # Copies between rows of GDNPool, [N, 2] int64 each (from, to): of cached states, before the model runs, and of
    # states that are to be cached, right after.
    state_restores: np.ndarray
    state_saves: np.ndarray
    # Input ids of the decodes, row after row, of a step in which some bring drafts: its last token, and its draft.
    # Empty without drafts: then the ids are on the device.
    verify_token_ids: np.ndarray = field(default_factory=lambda: NO_DRAFTS)
    # Of a verify step whose drafts the device makes, up to num_new - 1 of each: [R] int32, tokens in the KV before the
    # step, or -1 where a step in flight decides. Then prefix_lens and seq_lens are the most that they may be.
    device_lens: np.ndarray | None = None
    # Requests whose sources the encoder reads ahead of the step: what it writes is in pages of their source rows.
    encoded: Sequence[Request] = ()

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.requests)

    @property
    def seq_lens(self) -> np.ndarray:
        """[R] int32: tokens in the KV after this step."""
        lens: np.ndarray = self.prefix_lens + self.num_new
        return lens

    @property
    def has_adapters(self) -> bool:
        """True if some request has an adapter."""
        return bool((self.adapter_slots >= 0).any())

    @property
    def num_adapters(self) -> int:
        """Different adapters of its requests."""
        return np.unique(self.adapter_slots[self.adapter_slots >= 0]).size

    @property
    def has_drafts(self) -> bool:
        """True of a verify step: some decodes bring drafts, or the device makes them some."""
        return self.verify_token_ids.size > 0 or self.device_lens is not None

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the decodes, drafts among them: the first of the step."""
        if self.device_lens is not None:
            return self.num_tokens
        return self.verify_token_ids.size or self.num_decodes

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the rows behind the decodes."""
        return self.num_tokens - self.num_decode_tokens

    @property
    def is_idle(self) -> bool:
        """True of a data-parallel rank's part of a step that has no request of the rank: its one row is the dummy."""
        return bool(self.rows[0] == 0)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRuns:
    """The tokens of a verify step.

    Attributes:
        token_ids: [R, K + 1] int64: those of each row, as many as `counts` says. The last may be negative: a request
            has no token there.
        counts: [R]: accepted tokens of the draft, and the one behind them; 0 of rows that are not sampled.
        broken_drafts: [R] bool: logits of a row with a draft were no numbers, perhaps by the draft's fault.
        num_drafted: [R]: tokens of each draft.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    broken_drafts: np.ndarray
    num_drafted: np.ndarray

    def of(self, rows: np.ndarray) -> TokenRuns:
        """The runs of some rows."""
        every = self.token_ids, self.counts, self.broken_drafts, self.num_drafted
        return TokenRuns(*(values[rows] for values in every))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UpdateResult:
    """The result of one step.

    `accepted` are the indices of the batch's rows whose token was appended to its request. Tokens of all other rows are
    to be dropped. They are of a chunk in the middle of a prompt, or of a request that ended meanwhile.
    `finished` are the requests that this update ended, by a stop token or by their length. `broken` are the requests
    that it ended because they have no next token. `counts` are the tokens that were appended for each of `accepted`;
    None: one each.
    """

    accepted: list[int]
    finished: list[Request]
    broken: list[Request]
    counts: list[int] | None = None
    num_drafted: np.ndarray | None = None  # of a verify step: TokenRuns'
