"""Random draws that depend on (seed, position, token) and on nothing else: not the batch, the row, or earlier draws.

FlashInfer's samplers, and torch's generators, number their random values by row, so that a request's tokens would
change with its neighbours. Here each value is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014) at a counter, computed with int64 tensor operations that wrap alike on CPU and CUDA.

Shape legend: S rows, W scores a row (a multiple of BLOCK), B blocks of BLOCK scores.
"""

from __future__ import annotations

import torch

# Scores a block of the two-stage draw: near sqrt(152k), where hashing B + BLOCK counters a row is cheapest.
BLOCK = 256

_MASK64 = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def padded_vocab_size(vocab_size: int) -> int:
    """Scores in a row of a draw: a multiple of BLOCK."""
    return -(-vocab_size // BLOCK) * BLOCK


def padded_scores(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """The scores that draw_tokens draws from: [S, V] and [S] float32 → logits / temperature, [S, padded V] float32.

    By a product with the reciprocal, as ops/tokens/draw.py computes it: to the last bit.
    """
    num_rows, vocab_size = logits.shape
    scores = torch.empty(num_rows, padded_vocab_size(vocab_size), dtype=torch.float32, device=logits.device)
    torch.mul(logits, temperatures.reciprocal()[:, None], out=scores[:, :vocab_size])
    scores[:, vocab_size:] = -torch.inf
    return scores


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value


def derive_seed(seed: int, index: int) -> int:
    """The `index`-th seed in [0, 2**63) derived from `seed`.

    For requests that bring no seed (the engine's seed, the request's number) and for the answers of one seeded request
    with n > 1 (its seed, the answer's number). Keep the result with the request: a preempted one needs it again.
    """
    mixed = (seed + (index + 1) * _GAMMA) & _MASK64
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        mixed = ((mixed ^ (mixed >> shift)) * multiplier) & _MASK64
    return mixed >> 1


def _mix64(bits: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 bits of any shape."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        # torch shifts int64 arithmetically; the mask makes the shift a logical one.
        bits = bits ^ ((bits >> shift) & (2 ** (64 - shift) - 1))
        if multiplier != 1:
            bits = bits * _signed(multiplier)
    return bits


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One key a draw. seeds, positions: [S] int → [S] int64.

    Multiples of the golden ratio's 64 bits are far apart: (seed, position) pairs with seeds within 2**30 and positions
    within 2**33 of each other never collide. Others collide with the chance of any two 64-bit numbers.
    """
    return _mix64(seeds.long() * _signed(_GAMMA) + positions)


def uniform(keys: torch.Tensor, num_values: int) -> torch.Tensor:
    """Uniform values in (0, 1), ever more finely spaced towards 0. keys: [S] int64 → [S, num_values] float32."""
    counters = torch.arange(1, num_values + 1, device=keys.device) * _signed(_GAMMA)
    bits = _mix64(keys[:, None] + counters)
    # |int64| as float32 keeps 24 significant bits however small it is. The factor keeps the largest below 1; the clamp
    # keeps the one zero in 2**63 above it.
    return bits.to(torch.float32).abs_().mul_((1 - 2**-24) / 2**63).clamp_(min=2**-64)


def negative_gumbel(keys: torch.Tensor, num_values: int) -> torch.Tensor:
    """Standard Gumbel values, their sign turned; finite. keys: [S] int64 → [S, num_values] float32.

    log(-log(1 - u)): the extreme ones, which decide an argmax over many tokens, come from small u, where u is fine.
    """
    return uniform(keys, num_values).neg_().log1p_().neg_().log_()


def draw_tokens(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one index a row with probability softmax(scores). Gumbel-max in two stages: a block, then a token in it.

    Exact: a block's logsumexp is its log-probability, and the token is drawn from the block's own scores. It hashes
    B + BLOCK counters a row in place of W, which makes a draw little dearer than reading the scores. No data-dependent
    shape and no sync: safe inside a CUDA graph.

    Args:
        scores: [S, W] float32, contiguous, W a multiple of BLOCK; -inf is never drawn while the row has anything else.
        seeds: [S] int64.
        positions: [S] int: tokens of the request so far; the counter of its draws.

    Returns:
        [S] int64 indices in [0, W).
    """
    num_blocks = scores.shape[1] // BLOCK
    blocks = scores.view(-1, num_blocks, BLOCK)
    noise = negative_gumbel(row_keys(seeds, positions), num_blocks + BLOCK)
    chosen = (blocks.logsumexp(dim=-1) - noise[:, :num_blocks]).argmax(dim=-1)
    in_block = blocks.gather(1, chosen[:, None, None].expand(-1, 1, BLOCK)).squeeze(1)
    return chosen * BLOCK + (in_block - noise[:, num_blocks:]).argmax(dim=-1)
