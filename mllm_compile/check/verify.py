"""Compares the kernels around a captured verify step with torch's operations, on a small step.

Shape legend: R requests of the step, C tokens of each, M rows of the slot table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mllm_compile.check.verify_reference import begin_verify, end_verify
from mllm_compile.errors import CompileError
from mllm_compile.kernels.verify import verify_pieces
from mllm_compile.runtime.ops.tokens.verify_fields import (
    DRAFT_FIELD,
    DRAFTED_FIELDS,
    MOST_DRAFTED,
    RESULT_FIELDS,
    VERIFY_FIELDS,
)
from mllm_compile.runtime.program.linked_steps import PieceFunction
from mllm_compile.runtime.program.loaded import VerifyPieces
from mllm_compile.runtime.sampling.state import NUM_INTS

_ROWS, _REQUESTS, _TOKENS = 12, 9, 5
_LONGEST = 3000  # more than are looked through at once
_SETTINGS = ((2, 4, 0), (1, 3, 1))
_SYNTHETIC = ((-1.0, 0.0), (1.0, 0.5))


def check_verify_steps(pieces: VerifyPieces, page_size: int, device: torch.device) -> None:
    """
    Args:
        page_size: that the pieces are compiled for.

    Raises:
        CompileError: a piece does something else.
    """
    begin, end = verify_pieces(page_size)
    for seed, (settings, synthetic) in enumerate(zip(_SETTINGS, _SYNTHETIC, strict=True)):
        given = small_step(settings, page_size, _TOKENS, seed)
        drafted = _compared(begin.name, pieces.begin, lambda of: begin_verify(of, page_size), given, device)
        fields, _, last_tokens, lengths, history, *_, left = drafted
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, (_REQUESTS, _TOKENS), generator=generator)
        is_right = torch.randint(4, (_REQUESTS, _TOKENS - 1), generator=generator) > 0
        tokens[:, :-1] = left[:, 2 : 1 + _TOKENS].long().where(is_right, tokens[:, :-1])
        tokens[0] = -1
        ints = torch.randint(2**40, (NUM_INTS, _ROWS), generator=generator)
        results = torch.zeros(_REQUESTS, RESULT_FIELDS, dtype=torch.int64)
        given = [tokens, fields, left, torch.tensor(synthetic), ints, last_tokens, lengths, history, results]
        _compared(end.name, pieces.end, end_verify, given, device)


def small_step(
    settings: tuple[int, int, int], page_size: int, num_tokens: int, seed: int, longest: int = _LONGEST
) -> list[torch.Tensor]:
    """The arguments of begin_verify: drafts of the host, of the device and none; the last request is padding."""
    generator = torch.Generator().manual_seed(seed)

    def random(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    num_pages = longest // page_size + 1
    width = num_pages * page_size
    history = random(3, _ROWS, width).int()
    lengths = random(width - MOST_DRAFTED - 2, _ROWS).int()
    lengths[3], lengths[4:6] = 0, lengths[4:6] % 40
    pages = torch.randperm(_ROWS * num_pages, generator=generator).view(_ROWS, num_pages) + 1
    req_to_token = (pages[:, :, None] * page_size + torch.arange(page_size)).flatten(1).int()
    fields = torch.zeros(_REQUESTS, VERIFY_FIELDS, dtype=torch.int32)
    fields[:-1, 0] = torch.randperm(_ROWS - 1, generator=generator)[: _REQUESTS - 1] + 1
    fields[:, 1] = torch.where(random(2, _REQUESTS) == 0, -1, lengths[fields[:, 0]])
    fields[:, 2] = random(num_tokens, _REQUESTS)
    fields[:, 3] = torch.where(random(3, _REQUESTS) > 0, -1, random(num_tokens, _REQUESTS))
    fields[:, 4] = random(3, _REQUESTS) - 1
    fields[:, DRAFT_FIELD:] = random(3, _REQUESTS, MOST_DRAFTED)
    fields[-1] = 0
    last_tokens = history.gather(1, lengths[:, None].long())[:, 0].long()
    of_tokens = [torch.zeros(_REQUESTS, num_tokens, dtype=torch.int64) for _ in range(4)]
    of_settings = torch.tensor(settings, dtype=torch.int32)
    begin = [fields, of_settings, last_tokens, lengths, history, req_to_token, *of_tokens, of_tokens[0].int()]
    table = torch.full((_REQUESTS, num_tokens, num_pages), -7, dtype=torch.int32)
    return [*begin, table, torch.zeros(_REQUESTS, DRAFTED_FIELDS, dtype=torch.int32)]


def _compared(
    name: str,
    piece: PieceFunction,
    reference: Callable[[list[torch.Tensor]], object],
    given: list[torch.Tensor],
    device: torch.device,
) -> list[torch.Tensor]:
    """The arguments as the reference leaves them.

    Raises:
        CompileError: the piece leaves others.
    """
    theirs = [tensor.clone() for tensor in given]
    reference(theirs)
    ours = [tensor.to(device, copy=True) for tensor in given]
    piece(list(ours))
    if not all(torch.equal(one.cpu(), other) for one, other in zip(ours, theirs, strict=True)):
        raise CompileError(
            f"the kernels of {name} do something else than torch's operations on this machine. Set speculative.method: "
            "none to do without them, and report this."
        )
    return theirs
