"""Runs the kernels around a captured decode on a small step, against what torch's operations make of it.

Shape legend: S rows of the step, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mllm_compile.errors import CompileError
from mllm_compile.runtime.counter_rng import draw_tokens, padded_scores
from mllm_compile.runtime.cuda_graph.turns import NUM_TURNS, REQUEST_FIELDS
from mllm_compile.runtime.executor import PieceFunction
from mllm_compile.runtime.program import DecodeLoopForms
from mllm_compile.runtime.sampling_params import SamplingParams
from mllm_compile.runtime.sampling_state import SamplingState

_SEQ_LENS = (1, 2, 5, 70, 1, 300)  # with the new token; the last row is padding
_TURN = 2
_OTHERS = 3  # rows of the slot table that the step leaves alone


def check_decode_loop(
    forms: DecodeLoopForms, pieces: Mapping[str, PieceFunction], page_size: int, logits: torch.Tensor
) -> None:
    """
    Args:
        page_size: that the pieces are compiled for.
        logits: [rows, V], as the program gives them; tokens are chosen from these.

    Raises:
        CompileError: a piece does something else.
    """
    step = _Step(page_size, logits)
    step.begin(pieces[forms.begin])
    step.end(pieces[forms.end])


class _Step:
    """Requests in rows of their own, whose pages lie in no order, half of them greedy."""

    def __init__(self, page_size: int, logits: torch.Tensor) -> None:
        self._page_size = page_size
        device = self._device = logits.device
        size = self._size = len(_SEQ_LENS)
        self._logits = logits[torch.arange(size, device=device) % logits.shape[0]].contiguous()
        num_slots = size + _OTHERS
        num_pages = -(-max(_SEQ_LENS) // page_size)
        generator = torch.Generator().manual_seed(0)
        pages = torch.randperm(size * num_pages, generator=generator).view(size, num_pages)
        slots = (pages[:, :, None] * page_size + torch.arange(page_size)).flatten(1).int()
        self._rows = torch.randperm(num_slots - 1, generator=generator)[:size] + 1
        self._rows[-1] = 0
        self._seq_lens = torch.tensor(_SEQ_LENS, dtype=torch.int32)
        self._pages = pages.int().to(device)
        self._own_slots = slots[torch.arange(size), self._seq_lens.long() - 1]
        self._req_to_token = torch.zeros(num_slots, slots.shape[1], dtype=torch.int32)
        self._req_to_token[self._rows] = slots
        self._expected_slots = self._req_to_token.clone().to(device)
        for row, seq_len in zip(self._rows.tolist(), _SEQ_LENS, strict=True):  # the new token's page is not known yet
            self._req_to_token[row, (seq_len - 1) // page_size * page_size :] = 0
            self._expected_slots[row, -(-seq_len // page_size) * page_size :] = 0
        self._req_to_token = self._req_to_token.to(device)
        self._last_tokens = torch.randint(logits.shape[1], (num_slots,), generator=generator).to(device)
        self._turns = torch.tensor([_TURN, 0], device=device)
        self._state = SamplingState(num_slots, logits.shape[1], device)
        for index, row in enumerate(self._rows[:-1].tolist()):
            params = SamplingParams(temperature=0.7 + 0.1 * index if index % 2 else 0.0)
            self._state.set_request(row, params, [0], default_seed=index)
        self._state.flush()

    def begin(self, piece: PieceFunction) -> None:
        size, device = self._size, self._device
        requests = torch.zeros(NUM_TURNS, size + 2, REQUEST_FIELDS, dtype=torch.int32, device=device)
        requests[_TURN, :size, 0] = self._rows.int().to(device)
        requests[_TURN, :size, 1] = self._seq_lens.to(device)
        requests[_TURN, :size, 2] = self._own_slots.to(device)
        requests[_TURN + 1, :, :2] = torch.tensor([-1, 1])  # the turn after: inputs in their places
        input_ids, positions, out_cache_loc, rows = torch.full((4, size), -7, device=device)
        places = [input_ids, positions, out_cache_loc, rows, torch.full((size,), -7, dtype=torch.int32, device=device)]
        page_table = torch.full((size, self._pages.shape[1]), -7, dtype=torch.int32, device=device)
        arguments = [requests, self._last_tokens, self._req_to_token, *places, page_table]
        piece([self._turns, *arguments])
        on_device = self._rows.to(device)
        seq_lens = self._seq_lens.to(device)
        expected = [self._last_tokens[on_device], seq_lens.long() - 1, self._own_slots.long().to(device), on_device]
        num_pages = -(-seq_lens // self._page_size)
        is_page = torch.arange(self._pages.shape[1], device=device) < num_pages[:, None]
        _check(
            "begin_decode",
            all(torch.equal(place, values) for place, values in zip(places, [*expected, seq_lens], strict=True))
            and torch.equal(page_table, self._pages.where(is_page, -7))
            and torch.equal(self._req_to_token, self._expected_slots),
        )
        before = [place.clone() for place in (*places, page_table)]
        piece([self._turns + 1, *arguments])
        same = zip((*places, page_table), before, strict=True)
        _check("begin_decode", all(torch.equal(place, values) for place, values in same))

    def end(self, piece: PieceFunction) -> None:
        rows, seq_lens = self._rows.to(self._device), self._seq_lens.to(self._device)
        chosen = torch.full((NUM_TURNS, self._size + 2), -7, device=self._device)
        before = self._last_tokens.clone()
        arguments = [self._logits, *self._state.tables, rows, seq_lens, self._turns, self._last_tokens, chosen]
        tokens = piece(arguments)[0]
        params = self._state.gather(rows)
        drawn = draw_tokens(padded_scores(self._logits, params.temperature), params.seed, seq_lens.long())
        expected = torch.where(params.is_greedy != 0, self._logits.argmax(-1), drawn)
        # A draw's sums differ in their last digits, which may decide between two near blocks: in one row.
        _check("end_decode", bool((tokens != expected).sum() <= 1) and bool((tokens == expected)[::2].all()))
        before[rows[:-1]] = tokens[:-1]
        handed_on = torch.full_like(chosen, -7)
        handed_on[_TURN, : self._size] = tokens
        has_moved = torch.equal(self._turns, torch.tensor([_TURN + 1, _TURN], device=self._device))
        _check("end_decode", has_moved and torch.equal(self._last_tokens, before) and torch.equal(chosen, handed_on))


def _check(piece: str, is_right: bool) -> None:
    if not is_right:
        raise CompileError(
            f"the kernels of {piece} do something else than torch's operations on this machine. Set compile.backend: "
            "eager to do without them, and report this."
        )
