"""Compares the kernels around a captured decode with torch's operations, on a small step.

Shape legend: S rows of the step, V vocab.
"""

from __future__ import annotations

import torch

from mllm_compile.errors import CompileError
from mllm_compile.kernels.decode_loop import decode_loop_pieces
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS, REQUEST_FIELDS
from mllm_compile.runtime.program.linked_steps import PieceFunction
from mllm_compile.runtime.program.loaded import DecodeLoopPieces
from mllm_compile.runtime.sampling.counter_rng import draw_tokens, padded_scores
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.state import SamplingState

_SEQ_LENS = (1, 2, 5, 70, 1, 300, 17, 64, 65, 128, 33, 9, 16, 3, 200)  # with the new token
_MANY_PAGES, _LONGEST = 600, 40_000  # one more has so many pages, unless that is too long: more than are listed at once
_TEMPERATURES = (0.3, 3.0, 0.5, 2.0)
_PLACES = ("input_ids", "positions", "out_cache_loc", "rows", "seq_lens")
_REPLAY_SLOT = 2
_OTHERS = 3  # rows of the slot table that the step leaves alone


def check_decode_loop(pieces: DecodeLoopPieces, page_size: int, logits: torch.Tensor) -> None:
    """
    Args:
        page_size: that the pieces are compiled for.
        logits: [rows, V], as the program gives them; tokens are chosen from these.

    Raises:
        CompileError: a piece does something else.
    """
    step = _Step(page_size, logits)
    step.begin(pieces.begin)
    step.end(pieces.end)


class _Step:
    """Requests in rows of their own, whose pages are in no order, a third of them greedy; and a row of padding."""

    def __init__(self, page_size: int, logits: torch.Tensor) -> None:
        self._page_size = page_size
        dtype = str(logits.dtype).removeprefix("torch.")
        self._begin, self._end = decode_loop_pieces(dtype, logits.shape[1], page_size)
        device = self._device = logits.device
        lengths = (*_SEQ_LENS, min(_MANY_PAGES * page_size, _LONGEST), 0)
        size = self._size = len(lengths)
        num_slots = size + _OTHERS
        generator = torch.Generator().manual_seed(0)
        self._logits = logits[torch.arange(size, device=device) % logits.shape[0]].contiguous()
        self._seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self._positions = (self._seq_lens.long() - 1).clamp(min=0)
        self._rows = torch.randperm(num_slots - 1, generator=generator)[:size] + 1
        self._rows[-1] = 0
        self._pages = self._random_pages(max(lengths), generator)
        self._req_to_token, self._expected_slots = self._slot_tables(num_slots)
        self._own_slots = self._expected_slots[self._rows, self._positions]
        self._last_tokens = torch.randint(logits.shape[1], (num_slots,), generator=generator).to(device)
        self._replay_slot = torch.tensor([_REPLAY_SLOT, 0], device=device)
        self._state = SamplingState(num_slots, logits.shape[1], device)
        for index, row in enumerate(self._rows[:-1].tolist()):
            temperature = _TEMPERATURES[index % len(_TEMPERATURES)] if index % 3 else 0.0
            self._state.set_request(row, SamplingParams(temperature=temperature), [0], default_seed=index)
        self._state.flush()

    def _random_pages(self, longest: int, generator: torch.Generator) -> torch.Tensor:
        """[S, W] int32, page 0 for padding."""
        num_pages = -(-longest // self._page_size)
        pages = torch.randperm(self._size * num_pages, generator=generator).view(self._size, num_pages).int() + 1
        pages[-1] = 0
        return pages

    def _slot_tables(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The table of slots as it is before the step, without the pages of the new tokens, and with them."""
        slots = (self._pages[:, :, None] * self._page_size + torch.arange(self._page_size).int()).flatten(1)
        before = torch.zeros(num_slots, slots.shape[1], dtype=torch.int32)
        after = before.clone()
        first_of_page = (self._positions // self._page_size * self._page_size).tolist()
        for row, own, first in zip(self._rows.tolist(), slots, first_of_page, strict=True):
            before[row, :first] = own[:first]
            after[row, : first + self._page_size] = own[: first + self._page_size]
        return before, after

    def begin(self, piece: PieceFunction) -> None:
        size, device = self._size, self._device
        requests = torch.zeros(REPLAY_SLOTS, size + 2, REQUEST_FIELDS, dtype=torch.int32)
        for field, values in enumerate((self._rows, self._seq_lens, self._own_slots)):
            requests[_REPLAY_SLOT, :size, field] = values.int()
        requests[_REPLAY_SLOT + 1, :, :2] = torch.tensor([-1, 1])  # the slot after: inputs in their places
        # Each a tensor of its own: a package copies what does not begin at 16 bytes, and writes to the copy.
        signature = self._begin.signature
        places = {
            name: torch.full((size,), -7, dtype=getattr(torch, signature[name].dtype), device=device)
            for name in _PLACES
        }
        page_table = torch.full(self._pages.shape, -7, dtype=torch.int32, device=device)
        req_to_token = self._req_to_token.to(device)
        others = {"requests": requests.to(device), "last_tokens": self._last_tokens, "req_to_token": req_to_token}
        others |= {**places, "page_table": page_table}
        piece(self._begin.arguments(replay_slot=self._replay_slot, **others))
        newest = self._last_tokens.cpu()[self._rows]
        expected = [newest, self._positions, self._own_slots.long(), self._rows, self._seq_lens]
        is_page = torch.arange(self._pages.shape[1]) <= (self._positions // self._page_size)[:, None]
        _check(
            "begin_decode",
            all(torch.equal(place.cpu(), values) for place, values in zip(places.values(), expected, strict=True))
            and torch.equal(page_table.cpu(), self._pages.where(is_page, -7))
            and torch.equal(req_to_token.cpu(), self._expected_slots),
        )
        written = (*places.values(), page_table)
        before = [place.clone() for place in written]
        piece(self._begin.arguments(replay_slot=self._replay_slot + 1, **others))
        same = zip(written, before, strict=True)
        _check("begin_decode", all(torch.equal(place, values) for place, values in same))

    def end(self, piece: PieceFunction) -> None:
        rows, seq_lens = self._rows.to(self._device), self._seq_lens.to(self._device)
        chosen = torch.full((REPLAY_SLOTS, self._size + 2), -7, device=self._device)
        newest = self._last_tokens.clone()
        floats, ints = self._state.tables
        arguments = self._end.arguments(
            logits=self._logits,
            floats=floats,
            ints=ints,
            rows=rows,
            seq_lens=seq_lens,
            replay_slot=self._replay_slot,
            last_tokens=self._last_tokens,
            chosen=chosen,
        )
        tokens = piece(arguments)[0]
        params = self._state.gather(rows)
        is_greedy = params.is_greedy != 0
        drawn = draw_tokens(padded_scores(self._logits, params.temperature), params.seed, seq_lens.long())
        is_right = tokens == torch.where(is_greedy, self._logits.argmax(-1), drawn)
        # A draw's sums differ in their last digits, which may decide between two near blocks: in one row.
        _check("end_decode", bool(is_right[is_greedy].all()) and int((~is_right).sum()) <= 1)
        newest[rows[:-1]] = tokens[:-1]
        handed_on = torch.full_like(chosen, -7)
        handed_on[_REPLAY_SLOT, : self._size] = tokens
        has_moved = self._replay_slot.tolist() == [_REPLAY_SLOT + 1, _REPLAY_SLOT]
        _check("end_decode", has_moved and torch.equal(self._last_tokens, newest) and torch.equal(chosen, handed_on))


def _check(piece: str, is_right: bool) -> None:
    if not is_right:
        raise CompileError(
            f"the kernels of {piece} do something else than torch's operations on this machine. Set compile.backend: "
            "eager to do without them, and report this."
        )
