"""Drawing a token a row from logits, in two kernels: what counter_rng.draw_tokens does, in one pass over the logits.

Triton by hand, as `torch.library.triton_op`: it is a piece of the program (mllm_compile/kernels/sampling.py). Only the
piece compiler imports this module: a loaded package needs neither Triton nor this op.

A row's draw depends on its own logits, temperature, seed and position alone. A score equals torch's, from a logit and a
temperature, to the last bit, and a block's sum does not depend on its order. So a row draws the same token from its
logits here as from scores that were computed before, as for rows whose neighbours filter theirs.

Shape legend: S rows, V vocab, B blocks of BLOCK logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton
from triton.language.extra import libdevice

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.tokens.greedy import inf_where_no_number, token_if_finite
from mllm_compile.runtime.sampling.counter_rng import BLOCK

BLOCKS_AT_ONCE = 16  # of one program


@triton.jit
def _mix64(bits: tl.tensor) -> tl.tensor:
    """counter_rng._mix64; Triton shifts int64 arithmetically, the masks make the shifts logical ones."""
    bits = bits ^ ((bits >> 30) & 0x3FFFFFFFF)
    bits = bits * -4658895280553007687  # 0xBF58476D1CE4E5B9
    bits = bits ^ ((bits >> 27) & 0x1FFFFFFFFF)
    bits = bits * -7723592293110705685  # 0x94D049BB133111EB
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(seed: tl.tensor, position: tl.tensor, counters: tl.tensor) -> tl.tensor:
    """counter_rng.uniform at these counters (int64, from 1) of a draw."""
    key = _mix64(seed * -7046029254386353131 + position)  # 0x9E3779B97F4A7C15
    bits = _mix64(key + counters * -7046029254386353131)
    # (1 - 2**-24) / 2**63 and 2**-64, as there
    return tl.maximum(tl.abs(bits.to(tl.float32)) * 1.0842021078620191e-19, 5.421010862427522e-20)


@triton.jit
def _negative_gumbel(seed: tl.tensor, position: tl.tensor, counters: tl.tensor) -> tl.tensor:
    """counter_rng.negative_gumbel at these counters of a draw."""
    return libdevice.log(-libdevice.log1p(-uniform(seed, position, counters)))


@triton.jit
def product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a * b, rounded: of `*` and a difference that follows the compiler makes one operation that rounds but once."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _scores(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    V: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
) -> tl.tensor:
    """Scores of columns of a row, -inf past the vocabulary."""
    scores = tl.load(logits_ptr + row * V + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        scores = product(scores, tl.div_rn(1.0, tl.load(temperature_ptr + row)))
    return inf_where_no_number(scores)


@triton.jit
def block_sums(scores: tl.tensor) -> tl.tensor:
    """logsumexp of each row of [blocks, BLOCK]; inf where a score is.

    Summed as integers, so that the sum is the same whatever order the compiler gives it for another type of logits.
    256 parts of at most 2**22 fit, and are off by at most 256 halves of 2**-22 together; 64-bit ones cost three times
    the kernel's time.
    """
    largest = tl.max(scores, 1)
    base = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    parts = (tl.exp(scores - base[:, None]) * 4194304.0 + 0.5).to(tl.int32)  # 2**22
    sums = base + tl.log(tl.sum(parts, 1).to(tl.float32) * 2.384185791015625e-07)  # 2**-22
    return tl.where(largest == float("inf"), largest, sums)


@triton.jit
def draw_block(sums: tl.tensor, blocks: tl.tensor, seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The block of a row with the largest sum and Gumbel value."""
    return tl.argmax(sums - _negative_gumbel(seed, position, blocks.to(tl.int64) + 1), 0)


@triton.jit
def draw_within(
    scores: tl.tensor, within: tl.tensor, seed: tl.tensor, position: tl.tensor, B: tl.constexpr
) -> tl.tensor:
    """Draws the place in a block of these scores likewise."""
    return tl.argmax(scores - _negative_gumbel(seed, position, within.to(tl.int64) + B + 1), 0)


@triton.jit
def _block_scores_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    block_scores_ptr: tl.tensor,
    V: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """logsumexp of each block."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    scores = _scores(logits_ptr, temperature_ptr, row, columns, V, HAS_TEMPERATURE)
    sums = block_sums(scores)
    tl.store(block_scores_ptr + row * B + blocks, sums, mask=blocks < B)


@triton.jit
def _draw_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    block_scores_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    V: tl.constexpr,
    B: tl.constexpr,
    PADDED_B: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """The block of a row, the one with the largest sum and Gumbel value, and the token in it likewise."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    row = tl.program_id(0).to(tl.int64)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    blocks = tl.arange(0, PADDED_B)
    block_scores = tl.load(block_scores_ptr + row * B + blocks, mask=blocks < B, other=float("-inf"))
    chosen = draw_block(block_scores, blocks, seed, position)
    within = tl.arange(0, BLOCK)
    scores = _scores(logits_ptr, temperature_ptr, row, chosen * BLOCK + within, V, HAS_TEMPERATURE)
    token = chosen * BLOCK + draw_within(scores, within, seed, position, B)
    tl.store(tokens_ptr + row, token_if_finite(tl.minimum(token, V - 1), tl.max(block_scores, 0)).to(tl.int64))


@triton_op("mllm::draw_tokens", mutates_args={})
def draw_tokens(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """One token a row with probability softmax(logits / temperature).

    Args:
        logits: [S, V], contiguous, any float dtype; computed with in float32.
        seeds, positions: [S] int64.
        temperatures: [S] float32; None: 1.

    Returns:
        [S] int64, each under V, or NO_TOKEN: a row holds NaN or inf, or nothing but -inf.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    block_scores = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows,), dtype=torch.int64, device=logits.device)
    scores = (logits, seeds if temperatures is None else temperatures)
    constants = {
        "V": vocab_size,
        "B": num_blocks,
        "BLOCK": BLOCK,
        "HAS_TEMPERATURE": temperatures is not None,
        "EARLY": starts_early(),
    }
    grid = (num_rows, triton.cdiv(num_blocks, BLOCKS_AT_ONCE))
    wrap_triton(_block_scores_kernel)[grid](
        *scores, block_scores, BLOCKS_AT_ONCE=BLOCKS_AT_ONCE, num_warps=4, **constants
    )
    padded = triton.next_power_of_2(num_blocks)
    wrap_triton(_draw_kernel)[(num_rows,)](
        *scores, seeds, positions, block_scores, tokens, PADDED_B=padded, num_warps=8, **constants
    )
    return tokens
