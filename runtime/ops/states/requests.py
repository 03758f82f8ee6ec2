"""The rules that all kernels of layers with a state keep, and the arithmetic that they share.

The kernels read rows, lengths and flags of requests from device memory alone, so a captured graph serves any batch of
its size. Each takes a batch in one of two ways, by the constant DECODES: one token of each request, token i for request
i, or the tokens from starts[i] to ends[i]. A request whose row is 0 is padding: it has no state, and leaves none. Where
a kernel stores must not come from a function that reads these: torch would take them for written, and have packages
copy them first. So each kernel reads its request's row and bounds itself, in lines that are alike.

Imports Triton: only the kernels of this folder need it.

Shape legend as in runtime/state/layer.py; T tokens, B requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NORM_EPS = 1e-6  # of Transformers' and FLA's l2norm
SEARCHED = 64  # requests that a block looks at together to find its own
# Logarithms of decays are summed up over a chunk, and differences of sums are used: lower ones would cost the others
# their digits. exp(-30) is 1e-13, which float32 sums cannot tell from 0.
LEAST_LOG_DECAY = tl.constexpr(-30.0)


@triton.jit
def find_block(
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_requests: tl.tensor,
    block: tl.tensor,
    SIZE: tl.constexpr,
    SEARCHED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor | int]:
    """(request, index among its blocks) of a block, counted over the blocks of SIZE tokens of all requests;
    num_requests where there are not so many."""
    request = num_requests
    index = 0
    passed = 0
    for first in range(0, num_requests, SEARCHED):
        requests = first + tl.arange(0, SEARCHED)
        is_request = requests < num_requests
        starts = tl.load(starts_ptr + requests, mask=is_request, other=0)
        ends = tl.load(ends_ptr + requests, mask=is_request, other=0)
        blocks = (ends - starts + SIZE - 1) // SIZE
        behind = passed + tl.cumsum(blocks, 0)
        is_it = (behind > block) & (behind - blocks <= block)
        request += tl.sum(tl.where(is_it, requests - num_requests, 0), 0)
        index += tl.sum(tl.where(is_it, block - (behind - blocks), 0), 0)
        passed += tl.sum(blocks, 0)
    return request, index


@triton.jit
def inverse_of(below: tl.tensor, SIDE: tl.constexpr, LEVELS: tl.constexpr, PRODUCTS: tl.constexpr) -> tl.tensor:
    """(1 + below)⁻¹, where `below` is zero on and above the diagonal. Two neighbouring blocks become one, from blocks
    of 1 to SIDE / 2, as in forward substitution. No power of `below` grows."""
    row = tl.arange(0, SIDE)[:, None]
    column = tl.arange(0, SIDE)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where((row == column + 1) & (row % 2 == 1), below, 0.0)
    for level in tl.static_range(1, LEVELS):
        size = 1 << level
        is_between = (row // size == column // size + 1) & ((row // size) % 2 == 1)
        inner = tl.dot(inverse, tl.where(is_between, below, 0.0), input_precision=PRODUCTS)
        inverse -= tl.dot(inner, inverse, input_precision=PRODUCTS)
    return inverse


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), and x where that is the same; exact where exp(x) is small too."""
    grown = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + grown
    # log(1 + y) = y · log(u) / (u - 1) with u = 1 + y as it was rounded (Goldberg 1991, theorem 4).
    small = tl.where(above == 1.0, grown, tl.log(above) * grown / tl.where(above == 1.0, 1.0, above - 1.0))
    return tl.where(x > 20.0, x, small)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    return x / (1.0 + tl.exp(-x))


def num_blocks(tokens: torch.Tensor, rows: torch.Tensor, size: int) -> int:
    """Blocks of `size` tokens that requests have at most: each may have one that is not full."""
    return triton.cdiv(tokens.shape[0], size) + rows.shape[0]
