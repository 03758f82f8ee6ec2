"""The rules that all kernels of layers with a state keep, and the arithmetic that they share.

The kernels read rows, lengths and flags of requests from device memory alone, so a captured graph serves any batch of
its size. Each takes a batch in one of two ways, by the constant DECODES: one token of each request, where request i's
is token i, or the tokens from starts[i] to ends[i]. A request whose row is 0 is padding: it has no state, and leaves
none.
A kernel reads these itself, not by a function: torch would take what goes through one, and comes to a store, for
written, and have packages copy it first.

Imports Triton: only the kernels of this folder need it.

Shape legend as in runtime/state/layer.py; T tokens, B requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Logarithms of decays are summed up over a chunk, and differences of sums are what counts: lower ones would cost the
# others their digits. exp(-30) is 1e-13: nothing that float32 sums can tell from 0.
LEAST_LOG_DECAY = tl.constexpr(-30.0)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), and x where that is the same; exact where exp(x) is small too."""
    grown = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + grown
    # log(1 + y) = y · log(u) / (u - 1) with u = 1 + y as it was rounded (Goldberg 1991, theorem 4).
    small = tl.where(above == 1.0, grown, tl.log(above) * grown / tl.where(above == 1.0, 1.0, above - 1.0))
    return tl.where(x > 20.0, x, small)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


def num_blocks(tokens: torch.Tensor, rows: torch.Tensor, size: int) -> int:
    """Blocks of `size` tokens that requests have at most: each may have one that is not full."""
    return triton.cdiv(tokens.shape[0], size) + rows.shape[0]


def exact_products(dtype: torch.dtype) -> str:
    """How tl.dot multiplies float32: tokens of 16 bits are whole in tf32, others take three products of parts."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
