"""Runs the compiler's own kernels on small inputs: attention, the choice of tokens, the loop of captured decodes
(check/decode_loop.py), and kernels that no batch reaches.

The self-check's batches hold a few short prompts, and all their logits. No request decodes there, no token is chosen,
and only one kernel for many tokens runs. A program without such kernels, as on a CPU, has nothing to check.

Shape legend: S rows, V vocab.
"""

from __future__ import annotations

import torch

from mllm_compile.check.decode_loop import check_decode_loop
from mllm_compile.check.served import Served
from mllm_compile.check.verify import check_verify_steps
from mllm_compile.errors import CompileError
from mllm_compile.kernels import of_every_kind
from mllm_compile.runtime.ops import family
from mllm_compile.runtime.program.link import LinkedProgram
from mllm_compile.runtime.program.spec import StoredSamplingPieces
from mllm_compile.runtime.sampling.counter_rng import draw_tokens, padded_scores
from mllm_compile.runtime.sampling.logprobs import token_logprobs
from mllm_compile.runtime.sampling.sampler import SamplingPieces

_NUM_DRAWS = 32
_SCORE_TOLERANCE = 1e-4
_HINT_OF_SAMPLING = (
    "they do not serve this vocabulary on this machine. Set compile.backend: eager to do without them, and report this."
)


def check_written_pieces(
    linked: LinkedProgram,
    page_size: int,
    dtype: torch.dtype,
    logits: torch.Tensor,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """
    Args:
        page_size: tokens of a KV page; attention's pieces are compiled for it.
        dtype: the type of queries.
        logits: [S, V], as the program gives them; tokens are chosen from these.
        cache_dtype: the type of keys and values; None: `dtype`.

    Raises:
        CompileError: a piece computes something else than torch's operations.
    """
    program = linked.program
    served = Served(page_size, dtype, cache_dtype or dtype, logits.device)
    for check_attention in of_every_kind("mllm_compile.check", "check"):
        check_attention(linked, served)
    if program.sampling is not None and linked.sampling is not None:
        _check_sampling(program.sampling, linked.sampling, logits)
    if linked.decode_loop is not None:
        check_decode_loop(linked.decode_loop, page_size, logits)
    if linked.verify is not None:
        check_verify_steps(linked.verify, page_size, logits.device)
    for name, members in program.kernels.items():
        for fault in family(name).faults(members, logits.device):
            raise CompileError(fault)


def relative_errors(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """‖ours − theirs‖ / ‖theirs‖ of each row, [S]; both [S, V]."""
    ours, theirs = ours.float(), theirs.float()
    differences: torch.Tensor = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    return differences


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """That of the worst row."""
    return relative_errors(ours, theirs).max().item()


def _check_sampling(variants: StoredSamplingPieces, pieces: SamplingPieces, logits: torch.Tensor) -> None:
    """Checks rows with a temperature, seed and position of their own."""
    generator = torch.Generator().manual_seed(0)
    logits = logits[torch.arange(_NUM_DRAWS, device=logits.device) % logits.shape[0]]
    temperatures = torch.linspace(0.5, 1.5, _NUM_DRAWS, device=logits.device)
    seeds = torch.randint(2**62, (_NUM_DRAWS,), generator=generator).to(logits.device)
    positions = torch.randint(4096, (_NUM_DRAWS,), generator=generator).to(logits.device)
    scores = padded_scores(logits, temperatures)
    drawn = draw_tokens(scores, seeds, positions)
    # Sums of a draw's exponentials differ in their last digits, which may decide between two near blocks: in one row.
    for name, piece, inputs, theirs, num_others in (
        (variants.greedy, pieces.greedy, [logits], logits.argmax(-1), 0),
        (variants.from_logits, pieces.from_logits, [logits, temperatures, seeds, positions], drawn, 1),
        (variants.from_scores, pieces.from_scores, [scores, seeds, positions], drawn, 1),
    ):
        wrong = int((piece(inputs)[0] != theirs).sum())
        if wrong > num_others:
            raise CompileError(
                f"the kernels of {name} choose other tokens than torch's operations in {wrong} of {_NUM_DRAWS} rows: "
                f"{_HINT_OF_SAMPLING}"
            )
    _check_scores(pieces, logits, temperatures.reciprocal(), drawn)


def _check_scores(pieces: SamplingPieces, logits: torch.Tensor, factors: torch.Tensor, tokens: torch.Tensor) -> None:
    """Checks log-probabilities and ranks of tokens [S]; of scores in float32 they are the same to the last bit."""
    found = token_logprobs(logits, tokens, 1, factors, pieces)
    wanted = token_logprobs(logits, tokens, 1, factors)
    same = token_logprobs(logits.float(), tokens, 1, factors, pieces)
    pairs = (found.logprobs, wanted.logprobs), (found.top_logprobs, wanted.top_logprobs)
    error = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    is_right = error < _SCORE_TOLERANCE and torch.equal(found.ranks, wanted.ranks)
    if not is_right or not torch.equal(found.logprobs, same.logprobs):
        raise CompileError(
            f"the kernels of log-probabilities differ from torch's operations by {error:.2g} (limit "
            f"{_SCORE_TOLERANCE:g}), in a rank, or between two types: {_HINT_OF_SAMPLING}"
        )
