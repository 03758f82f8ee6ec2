"""The most probable token of each row, in two kernels: the largest logit of each block, then of the row.

Triton by hand, as `torch.library.triton_op`: it is a piece of the program (mllm_compile/kernels/sampling.py). Only the
piece compiler imports this module: a loaded package needs neither Triton nor this op. torch's argmax takes two to three
times as long (256 rows of 151,936 logits on an H200: 55.0 against 23.6 µs).

A logit that is no number counts as inf, as a maximum would pass it over. So the largest logit of a row alone says
whether there is a token to choose: an infinite one gives NO_TOKEN.

Shape legend: S rows, V vocab, B blocks of BLOCK logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites

_BLOCK = 4096  # with 4 warps the fastest, or within 1 µs, of 1024 to 16384 for 1 to 256 rows of 151,936 logits


@triton.jit
def inf_where_no_number(logits: tl.tensor) -> tl.tensor:
    """NaN → inf."""
    return tl.where(logits == logits, logits, float("inf"))


@triton.jit
def token_if_finite(token: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """`token`, or NO_TOKEN where the largest logit of its row is inf or -inf."""
    return tl.where(tl.abs(largest) == float("inf"), -1, token)


@triton.jit
def _largest_of_blocks_kernel(
    logits_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    V: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * V + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    logits = inf_where_no_number(logits)
    largest = tl.max(logits, 0)
    tl.store(largest_ptr + row * B + block, largest)
    tl.store(tokens_ptr + row * B + block, tl.min(tl.where(logits == largest, columns, V - 1), 0))


@triton.jit
def _largest_of_row_kernel(
    largest_ptr: tl.tensor,
    block_tokens_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    V: tl.constexpr,
    B: tl.constexpr,
    PADDED_B: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Takes the lowest id among equals."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, PADDED_B)
    largest = tl.load(largest_ptr + row * B + blocks, mask=blocks < B, other=float("-inf"))
    tokens = tl.load(block_tokens_ptr + row * B + blocks, mask=blocks < B, other=V - 1)
    top = tl.max(largest, 0)
    token = tl.min(tl.where(largest == top, tokens, V - 1), 0)
    tl.store(tokens_ptr + row, token_if_finite(token, top).to(tl.int64))


@triton_op("mllm::greedy_tokens", mutates_args={})
def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id of the largest logit.

    Args:
        logits: [S, V], contiguous, any float dtype.

    Returns:
        [S] int64, each under V, or NO_TOKEN: a row holds NaN or inf, or nothing but -inf.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    largest = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    block_tokens = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    tokens = torch.empty((num_rows,), dtype=torch.int64, device=logits.device)
    constants = {"V": vocab_size, "B": num_blocks, "EARLY": starts_early()}
    wrap_triton(_largest_of_blocks_kernel)[(num_rows, num_blocks)](
        logits, largest, block_tokens, BLOCK=_BLOCK, num_warps=4, **constants
    )
    wrap_triton(_largest_of_row_kernel)[(num_rows,)](
        largest, block_tokens, tokens, PADDED_B=triton.next_power_of_2(num_blocks), num_warps=1, **constants
    )
    return tokens
