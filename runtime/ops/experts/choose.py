"""A router's choice of experts: the largest scores of each token, with softmax and renormalisation, in one kernel.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor this op.

Shape legend: T tokens, E experts, k experts a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.experts.shapes import SOFTMAX_OF_ALL

_SCORES_AT_ONCE = 128  # of one program, which is one warp: the largest of a row is found by shuffles alone


@triton.jit
def _choose_kernel(
    scores_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_tokens: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    PADDED_E: tl.constexpr,
    PADDED_K: tl.constexpr,
    TOKENS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """TOKENS tokens; the lowest of equal scores' experts comes first. A token with scores that are no numbers
    chooses the first experts with the weight NaN."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, PADDED_E)
    choices = tl.arange(0, PADDED_K)
    is_token = tokens < num_tokens
    is_score = is_token[:, None] & (experts < E)[None, :]
    scores = tl.load(scores_ptr + tokens[:, None] * E + experts[None, :], mask=is_score, other=float("-inf"))
    scores = scores.to(tl.float32)
    if SOFTMAX == 1:
        scores = tl.exp(scores - tl.max(scores, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    is_broken = tl.sum((is_score & (scores != scores)).to(tl.int32), 1) > 0
    weights = tl.full((TOKENS, PADDED_K), float("-inf"), tl.float32)
    ids = tl.zeros((TOKENS, PADDED_K), tl.int64)
    remaining = tl.where(is_score, scores, float("-inf"))
    is_left = is_score
    for choice in tl.static_range(K):
        best = tl.max(remaining, 1)
        # Of the remaining experts: a score of -inf, with which routers leave groups out, is still an expert's.
        candidates = tl.where(is_left & (remaining == best[:, None]), experts[None, :], PADDED_E)
        index = tl.min(candidates, 1)
        is_left = is_left & (experts[None, :] != index[:, None])
        remaining = tl.where(is_left, remaining, float("-inf"))
        is_this = (choices == choice)[None, :]
        weights = tl.where(is_this, best[:, None], weights)
        ids = tl.where(is_this, tl.where(is_broken, choice, index).to(tl.int64)[:, None], ids)
    if SOFTMAX == 2:
        weights = tl.exp(weights - tl.max(weights, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
    if RENORMALISE:
        weights = weights / tl.sum(tl.where((choices < K)[None, :], weights, 0.0), 1)[:, None]
    weights = tl.where(is_broken[:, None], float("nan"), weights)
    places = tokens[:, None] * K + choices[None, :]
    is_choice = is_token[:, None] & (choices < K)[None, :]
    tl.store(weights_ptr + places, weights.to(weights_ptr.dtype.element_ty), mask=is_choice)
    tl.store(ids_ptr + places, ids, mask=is_choice)


@triton_op("mllm::choose_experts", mutates_args={})
def choose_experts(
    scores: torch.Tensor, num_chosen: int, softmax: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num_chosen` largest of each row's scores, the largest first.

    Args:
        scores: [..., E].
        softmax: NO_SOFTMAX; SOFTMAX_OF_ALL scores, before the choice; SOFTMAX_OF_CHOSEN ones. Both compute in float32.
        renormalise: divide by the sum of the chosen ones.

    Returns:
        Weights [..., k], in float32 after a softmax of all, else in the scores' dtype; and experts [..., k] int64. If
        a score of a row is NaN, so are its weights.
    """
    scores = scores.contiguous()
    num_experts = scores.shape[-1]
    num_tokens = scores.numel() // num_experts
    shape = (*scores.shape[:-1], num_chosen)
    dtype = torch.float32 if softmax == SOFTMAX_OF_ALL else scores.dtype
    weights = torch.empty(shape, dtype=dtype, device=scores.device)
    ids = torch.empty(shape, dtype=torch.int64, device=scores.device)
    padded = triton.next_power_of_2(num_experts)
    tokens_at_once = max(1, _SCORES_AT_ONCE // padded)
    wrap_triton(_choose_kernel)[((num_tokens + tokens_at_once - 1) // tokens_at_once,)](
        scores,
        weights,
        ids,
        num_tokens,
        E=num_experts,
        K=num_chosen,
        PADDED_E=padded,
        PADDED_K=triton.next_power_of_2(num_chosen),
        TOKENS=tokens_at_once,
        SOFTMAX=softmax,
        RENORMALISE=renormalise,
        EARLY=starts_early(),
        num_warps=1,
    )
    return weights, ids
