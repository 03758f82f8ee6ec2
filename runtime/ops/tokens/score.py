"""Log-probabilities and ranks of a token a row, in two kernels: one pass over the scores, none of them is written.

Triton by hand, as `torch.library.triton_op`: it is a piece of the program (mllm_compile/kernels/sampling.py). Only the
piece compiler imports this module: a loaded package needs neither Triton nor this op.

A row's numbers depend on its own scores alone, to the last bit, whatever the type that these come in: exponentials of
GROUP scores are added as integers, and groups always in the same order.

Shape legend: S rows, V vocab, N groups of GROUP scores, P parts of PART scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.tokens.draw import product
from mllm_compile.runtime.ops.tokens.greedy import inf_where_no_number

_GROUP = 32  # of a sum as integers: each is at most 2**25, and off by half of 2**-25
_PART = 4096  # of a program, as greedy.py's


@triton.jit
def _groups_kernel(
    scores_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    above_ptr: tl.tensor,
    V: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (row, part): each group's largest score and sum of exponentials, and how many are above the token's."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    factor = tl.load(factors_ptr + row)
    token = tl.minimum(tl.maximum(tl.load(tokens_ptr + row), 0), V - 1)
    chosen = product(tl.load(scores_ptr + row * V + token).to(tl.float32), factor)
    groups = part * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scores = tl.load(scores_ptr + row * V + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    scores = inf_where_no_number(product(scores, factor))
    tops = tl.max(scores, 1)
    base = tl.where(tl.abs(tops) == float("inf"), 0.0, tops)
    parts = (tl.exp(tl.minimum(scores - base[:, None], 0.0)) * 33554432.0 + 0.5).to(tl.int32)  # 2**25
    totals = tl.sum(parts, 1).to(tl.float32) * 2.9802322387695312e-08  # 2**-25
    tl.store(tops_ptr + row * N + groups, tops, mask=groups < N)
    tl.store(totals_ptr + row * N + groups, totals, mask=groups < N)
    tl.store(above_ptr + row * P + part, tl.sum(tl.sum((scores > chosen).to(tl.int32), 1), 0))


@triton.jit
def _rows_kernel(
    scores_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    above_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    V: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    PADDED_N: tl.constexpr,
    PADDED_P: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (row): the four numbers of score_tokens."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, PADDED_N)
    places = tl.arange(0, PADDED_P)
    tops = tl.load(tops_ptr + row * N + groups, mask=groups < N, other=float("-inf"))
    totals = tl.load(totals_ptr + row * N + groups, mask=groups < N, other=0.0)
    above = tl.load(above_ptr + row * P + places, mask=places < P, other=0)
    token = tl.minimum(tl.maximum(tl.load(tokens_ptr + row), 0), V - 1)
    chosen = product(tl.load(scores_ptr + row * V + token).to(tl.float32), tl.load(factors_ptr + row))
    top = tl.max(tops, 0)
    is_finite = tl.abs(top) != float("inf")
    base = tl.where(is_finite, top, 0.0)
    log_sum = tl.log(tl.sum(totals * tl.exp(tl.minimum(tops - base, 0.0)), 0))
    top = tl.where(is_finite, top, float("nan"))
    tl.store(out_ptr + row, (chosen - top) - log_sum)
    tl.store(out_ptr + num_rows + row, top)
    tl.store(out_ptr + 2 * num_rows + row, log_sum)
    tl.store(out_ptr + 3 * num_rows + row, (1 + tl.sum(above, 0)).to(tl.float32))


@triton_op("mllm::score_tokens", mutates_args={})
def score_tokens(scores: torch.Tensor, factors: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The log-softmax of scores at one token a row, and what those of the others are made of.

    Args:
        scores: [S, V], contiguous, any float dtype, V under 2**24; computed with in float32.
        factors: [S] float32, positive: scores are multiplied by them first.
        token_ids: [S] int64; a negative one stands for token 0.

    Returns:
        [4, S] float32: the token's log-probability; the row's largest score; the logarithm of the sum of exp(score -
        largest); how many scores are larger than the token's, and one. A token's log-probability is its score minus
        the largest minus the logarithm, in this order. The second is NaN where a row holds NaN or inf, or nothing but
        -inf.
    """
    num_rows, vocab_size = scores.shape
    num_groups, num_parts = triton.cdiv(vocab_size, _GROUP), triton.cdiv(vocab_size, _PART)
    tops = torch.empty((num_rows, num_groups), dtype=torch.float32, device=scores.device)
    totals = torch.empty_like(tops)
    above = torch.empty((num_rows, num_parts), dtype=torch.int32, device=scores.device)
    out = torch.empty((4, num_rows), dtype=torch.float32, device=scores.device)
    given = (scores, factors, token_ids, tops, totals, above)
    constants = {"V": vocab_size, "N": num_groups, "P": num_parts, "EARLY": starts_early()}
    wrap_triton(_groups_kernel)[(num_rows, num_parts)](
        *given, GROUP=_GROUP, GROUPS=_PART // _GROUP, num_warps=4, **constants
    )
    wrap_triton(_rows_kernel)[(num_rows,)](
        *given,
        out,
        num_rows,
        PADDED_N=triton.next_power_of_2(num_groups),
        PADDED_P=triton.next_power_of_2(num_parts),
        num_warps=8,
        **constants,
    )
    return out
