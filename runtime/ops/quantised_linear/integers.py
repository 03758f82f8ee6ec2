"""The weight that integers of four bits in lanes stand for (runtime/quantised/scheme.py), for products of many tokens.

Triton by hand, as ops/silu_mul.py: Inductor's kernel loads a byte for each number, one by one. Here a thread takes 32
inputs at a time, 16 bytes.

Shape legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.quantised.scheme import INT4_ZERO

_CHUNK = 32  # inputs that are in an order of their own
_CHUNKS = 128  # of a program


@triton.jit
def _numbers(
    words: tl.tensor, place: tl.constexpr, zeros: tl.tensor, scales: tl.tensor, dtype: tl.constexpr
) -> tl.tensor:
    """Number `place` of each word, [C, 4] for its four lanes."""
    return ((((words >> (4 * place)) & 15).to(tl.float32) - zeros) * scales).to(dtype)


@triton.jit
def _eights(
    words: tl.tensor, half: tl.constexpr, zeros: tl.tensor, scales: tl.tensor, dtype: tl.constexpr
) -> tl.tensor:
    """[C, 8] inputs: of each lane a number and the one behind it."""
    first, behind = _numbers(words, half, zeros, scales, dtype), _numbers(words, half + 4, zeros, scales, dtype)
    return tl.reshape(tl.join(first, behind), (words.shape[0], 8))


@triton.jit
def _one_behind_the_other(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """[C, 2 n] of two [C, n]."""
    both = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(both, (first.shape[0], 2 * first.shape[1]))


@triton.jit
def _integers_kernel(
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_chunks: tl.tensor,
    OF_GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """CHUNKS times 32 inputs; OF_GROUP of them share a scale; behind a row's last ones come the next row's."""
    chunks = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    is_there = chunks < num_chunks
    words = tl.load(values_ptr + chunks[:, None] * 4 + tl.arange(0, 4)[None, :], mask=is_there[:, None], other=0)
    scales = tl.load(scales_ptr + chunks // OF_GROUP, mask=is_there, other=0.0).to(tl.float32)[:, None]
    if zeros_ptr is None:
        zeros = tl.full((CHUNKS, 1), ZERO, tl.float32)
    else:
        zeros = tl.load(zeros_ptr + chunks // OF_GROUP, mask=is_there, other=0).to(tl.float32)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    first = _one_behind_the_other(_eights(words, 0, zeros, scales, dtype), _eights(words, 1, zeros, scales, dtype))
    second = _one_behind_the_other(_eights(words, 2, zeros, scales, dtype), _eights(words, 3, zeros, scales, dtype))
    numbers = _one_behind_the_other(first, second)
    if EARLY:  # no kernel writes weights, but the one ahead may read where this one writes
        wait_for_prerequisites()
        start_dependents()
    places = chunks.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + places, numbers, mask=is_there[:, None])


@triton_op("mllm::dequantised_integers", mutates_args={})
def dequantised_integers(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """
    Args:
        values: [N, K/2] uint8, as int4_lanes has them.
        scales: [N, G] of any floating point; G divides K / 32.
        zeros: [N, G] uint8; None: 8.

    Returns:
        [N, K] in `dtype`: multiplied in float32 and rounded once.
    """
    rows, columns = values.shape[0], 2 * values.shape[1]
    weight = torch.empty((rows, columns), dtype=dtype, device=values.device)
    num_chunks = rows * columns // _CHUNK
    wrap_triton(_integers_kernel)[(triton.cdiv(num_chunks, _CHUNKS),)](
        values.view(torch.int32),
        scales,
        zeros,
        weight,
        num_chunks,
        OF_GROUP=columns // (_CHUNK * scales.shape[1]),
        ZERO=INT4_ZERO,
        CHUNKS=_CHUNKS,
        EARLY=starts_early(),
        num_warps=4,
    )
    return weight
