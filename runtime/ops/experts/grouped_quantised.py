"""Rows times their experts' weights in few bits, a block of rows and a tile of columns a program; with silu(gate) * up.

As grouped.py, with two differences. A weight is read as it lies in memory and becomes the activations' type in
registers: so it, and not the rows, is the product's first operand, which tensor cores take from there. And of four
bits, two a byte, the two are multiplied with the even and the odd inputs, which are read as halves of words.

Shape legend: T tokens, k experts a token, E experts, K inputs, N outputs, G groups of inputs, B rows of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.experts.shapes import ONE_ROW
from mllm_compile.runtime.ops.shared_memory import most_shared_bytes

_LEAST_TILE = 16  # of a product on tensor cores


@triton.jit
def _halves_of_words(words, dtype: tl.constexpr):
    """The numbers of 16 bits in the lower and in the upper halves of words."""
    low = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    return low, ((words >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)


@triton.jit
def _eight_bit_floats(codes, dtype: tl.constexpr):
    """E4M3, exactly. As the last bits of an exponent and the first of a mantissa its bits are a number 2^120 times
    smaller. (Triton's own conversion goes by way of float16 and float32, and is for few GPUs.)"""
    larger = tl.full((1, 1), 1.329227995784916e36, tl.float32)  # 2^120
    if dtype == tl.bfloat16:
        bits = ((codes & 0x7F).to(tl.uint16) << 4) | ((codes & 0x80).to(tl.uint16) << 8)
        numbers = bits.to(tl.bfloat16, bitcast=True) * larger.to(tl.bfloat16)
    else:
        bits = ((codes & 0x7F).to(tl.uint32) << 20) | ((codes & 0x80).to(tl.uint32) << 24)
        numbers = (bits.to(tl.float32, bitcast=True) * larger).to(dtype)
    return numbers


@triton.jit
def _integers(codes, zeros, dtype: tl.constexpr):
    """Four bits less their zero points, exactly: integers below 128 stand in the last bits of 128 + integer."""
    if dtype == tl.bfloat16:
        numbers = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zeros + 128.0).to(tl.bfloat16)
    else:
        numbers = (codes.to(tl.float32) - zeros).to(dtype)
    return numbers


@triton.jit
def _powers(codes, dtype: tl.constexpr):
    """Powers of two of E8M0, for `_floats`. The smallest is half of the smallest normal number."""
    if dtype == tl.bfloat16:
        powers = tl.where(codes == 0, 0x40, codes.to(tl.uint16) << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        powers = tl.where(codes == 0, 0x400000, codes.to(tl.uint32) << 23).to(tl.uint32).to(tl.float32, bitcast=True)
    return powers


@triton.jit
def _floats(codes, powers, dtype: tl.constexpr):
    """E2M1 times powers of two, exactly. As the last bits of an exponent and the first of a mantissa a code is a number
    2^126 times smaller."""
    larger = tl.full((1, 1), 8.507059173023462e37, tl.float32)  # 2^126
    if dtype == tl.bfloat16:
        bits = ((codes & 7).to(tl.uint16) << 6) | ((codes & 8).to(tl.uint16) << 12)
        numbers = bits.to(tl.bfloat16, bitcast=True) * larger.to(tl.bfloat16) * powers
    else:
        bits = ((codes & 7).to(tl.uint32) << 22) | ((codes & 8).to(tl.uint32) << 28)
        numbers = (bits.to(tl.float32, bitcast=True) * larger * powers).to(dtype)
    return numbers


@triton.jit
def _quantised_linear_kernel(
    x_ptr,
    order_ptr,
    blocks_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    B: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ONE_ROW: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """COLUMNS outputs of a block of rows; of a gated weight COLUMNS / 2, and as many rows of gate and of up.

    DEPTH inputs at once are of one group, or groups are of mxfp4. Of four bits x comes as words of two inputs, if it is
    in 16 bits (WORDS).
    """
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    PARTS: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = COLUMNS // PARTS
    OUTPUTS: tl.constexpr = N * PARTS
    PER_BYTE: tl.constexpr = 1 if KIND == "fp8" else 2
    tiles: tl.constexpr = (N + WIDTH - 1) // WIDTH
    block = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * WIDTH
    lanes = tl.arange(0, B)
    if ONE_ROW:
        chosen = tl.load(order_ptr + block)  # the ids themselves: block j is the one token's row j
        num_rows = 1
        is_expert = (chosen >= 0) & (chosen < E)
        expert = tl.where(is_expert, chosen, -1).to(tl.int64)
        rows = tl.where(is_expert, block, -1 - block) + tl.zeros((B,), tl.int32)
    else:
        expert = tl.load(blocks_ptr + 2 * block).to(tl.int64)
        num_rows = tl.load(blocks_ptr + 2 * block + 1)
        rows = tl.load(order_ptr + block * B + lanes, mask=lanes < num_rows, other=0)
    is_row = lanes < num_rows
    dtype = out_ptr.dtype.element_ty
    if num_rows > 0:
        if expert < 0:
            # Padding gives zeros. A row whose id is no expert's gives NaN, so that its request ends with an error.
            outs = first + tl.arange(0, WIDTH)
            out_at = out_ptr + tl.where(rows < 0, -1 - rows, rows).to(tl.int64)[None, :] * N + outs[:, None]
            result = tl.where(rows < 0, float("nan"), 0.0)[None, :] + tl.zeros((WIDTH, B), tl.float32)
            tl.store(out_at, result.to(dtype), mask=is_row[None, :] & (outs < N)[:, None])
        else:
            # Rows of gate and of up take turns in the tile, so that a pair of neighbours is one output's.
            places = tl.arange(0, COLUMNS)
            columns = first + places // PARTS
            # Columns beyond the last read the first one, and are not stored.
            outputs = tl.where(columns < N, columns, 0) + places % PARTS * N
            wide = expert * OUTPUTS + outputs
            depth = tl.arange(0, DEPTH // PER_BYTE)
            # Lanes without a row read row 0, and are not stored.
            sources = (rows // CHOSEN if OF_TOKENS else rows).to(tl.int64)
            BYTES: tl.constexpr = K // PER_BYTE
            STRIDE: tl.constexpr = 1 if WORDS else PER_BYTE
            x_at = x_ptr + (sources[None, :] * BYTES + depth[:, None]) * STRIDE
            at = values_ptr + wide[:, None] * BYTES + depth[None, :]
            total = tl.zeros((COLUMNS, B), tl.float32)
            for start in range(0, BYTES, DEPTH // PER_BYTE):
                if BYTES % (DEPTH // PER_BYTE) == 0:
                    x = tl.load(x_at + start * STRIDE)
                    values = tl.load(at + start)
                else:
                    is_depth = depth + start < BYTES
                    x = tl.load(x_at + start * STRIDE, mask=is_depth[:, None], other=0)
                    values = tl.load(at + start, mask=is_depth[None, :], other=0)
                if WORDS:
                    x, odd = _halves_of_words(x, dtype)
                elif PER_BYTE == 2:
                    odd = tl.load(x_at + start * STRIDE + 1, mask=(depth + start < BYTES)[:, None], other=0)
                group = start * PER_BYTE // GROUP
                if KIND == "fp8":
                    if G == 1:
                        total = tl.dot(_eight_bit_floats(values, dtype), x, total, input_precision=PRECISION)
                    else:
                        part = tl.dot(_eight_bit_floats(values, dtype), x, input_precision=PRECISION)
                        total += part * tl.load(scales_ptr + wide * G + group).to(tl.float32)[:, None]
                elif KIND == "int4":
                    zeros = tl.full((1, 1), 8.0, tl.float32)
                    if HAS_ZEROS:
                        zeros = tl.load(zeros_ptr + wide * G + group).to(tl.float32)[:, None]
                    part = tl.dot(_integers(values & 15, zeros, dtype), x, input_precision=PRECISION)
                    part = tl.dot(_integers(values >> 4, zeros, dtype), odd, part, input_precision=PRECISION)
                    total += part * tl.load(scales_ptr + wide * G + group).to(tl.float32)[:, None]
                else:
                    SCALES: tl.constexpr = DEPTH // GROUP
                    groups = group + tl.arange(0, SCALES)
                    codes = tl.load(scales_ptr + wide[:, None] * G + groups[None, :], mask=groups[None, :] < G, other=0)
                    powers = tl.broadcast_to(_powers(codes, dtype)[:, :, None], (COLUMNS, SCALES, GROUP // 2))
                    powers = tl.reshape(powers, (COLUMNS, DEPTH // 2))
                    total = tl.dot(_floats(values & 15, powers, dtype), x, total, input_precision=PRECISION)
                    total = tl.dot(_floats(values >> 4, powers, dtype), odd, total, input_precision=PRECISION)
            if KIND == "fp8" and G == 1:
                total = total * tl.load(scales_ptr + wide).to(tl.float32)[:, None]
            if HAS_BIAS:
                total += tl.load(bias_ptr + wide).to(tl.float32)[:, None]
            result = total
            if GATED:
                gates, ups = tl.split(tl.permute(tl.reshape(total, (WIDTH, 2, B)), (0, 2, 1)))
                # Rounded where the traced model rounds: each linear, silu, and the product.
                gates = gates.to(dtype).to(tl.float32)
                silu = (gates / (1.0 + tl.exp(-gates))).to(dtype).to(tl.float32)
                result = silu * ups.to(dtype).to(tl.float32)
            outs = first + tl.arange(0, WIDTH)
            out_at = out_ptr + rows.to(tl.int64)[None, :] * N + outs[:, None]
            tl.store(out_at, result.to(dtype), mask=is_row[None, :] & (outs < N)[:, None])


# By the largest block that it is for: columns of a program's tile (of gate and up together), bytes of a row of the
# weight at once, warps, and loads under way.
_TILINGS = {
    16: (64, 128, 4, 4),
    32: (64, 128, 4, 4),
    128: (128, 64, 8, 3),
}


def _tiling(block: int, outputs: int, inputs: int, group: int, kind: str) -> dict[str, int]:
    """The kernel's sizes for a block; tiles of small weights are smaller, and loads under way fit the shared memory."""
    columns, num_bytes, warps, stages = next(tiling for most, tiling in _TILINGS.items() if block <= most)
    per_byte = 1 if kind == "fp8" else 2
    depth = num_bytes * per_byte
    while depth > _LEAST_TILE * per_byte and depth // 2 >= inputs:
        depth //= 2
    while kind != "mxfp4" and group < inputs and group % depth:
        depth //= 2
    while columns > _LEAST_TILE and columns // 2 >= outputs:
        columns //= 2
    stage_bytes = (columns // per_byte + max(block, _LEAST_TILE) * 2) * depth
    stages = max(2, min(stages, most_shared_bytes() // (2 * stage_bytes)))
    return {"COLUMNS": columns, "DEPTH": depth, "num_warps": warps, "num_stages": stages}


@triton_op("mllm::quantised_grouped_linear", mutates_args={})
def quantised_grouped_linear(
    x: torch.Tensor,
    order: torch.Tensor,
    blocks: torch.Tensor | None,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    group: int,
    num_chosen: int,
    of_tokens: bool,
    is_gated: bool,
    block: int,
) -> torch.Tensor:
    """Multiplies rows by their experts' weights.

    Args:
        x: [T, K] if `of_tokens`, row t·k + j reads token t; else [T·k, K].
        order, blocks: what order_experts gave for `block`; with a block of ONE_ROW the ids [1, k] of one token, and
            None.
        values, scales, zeros, kind, group: the weight [E, N, K], as WeightScheme has it; with `is_gated` 2N, the gate
            first.
        bias: [E, N] or None; with `is_gated` 2N.
        num_chosen: k.
        is_gated: give silu(gate) * up.

    Returns:
        [T·k, N] in the dtype of x. Rows of padding are 0, those whose id is no expert's NaN.
    """
    x, order, values, scales = x.contiguous(), order.contiguous(), values.contiguous(), scales.contiguous()
    inputs = x.shape[1]
    outputs = values.shape[1] // (2 if is_gated else 1)
    num_rows = x.shape[0] * num_chosen if of_tokens else x.shape[0]
    out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    is_one = block == ONE_ROW
    num_blocks = num_chosen if is_one else blocks.shape[0]  # type: ignore[union-attr]
    tiling = _tiling(max(block, _LEAST_TILE), outputs * (2 if is_gated else 1), inputs, group, kind)
    width = tiling["COLUMNS"] // (2 if is_gated else 1)
    are_words = kind != "fp8" and x.element_size() == 2
    wrap_triton(_quantised_linear_kernel)[(num_blocks * ((outputs + width - 1) // width),)](
        x.view(torch.int32) if are_words else x,
        order,
        order if blocks is None else blocks,
        values.view(torch.uint8),
        scales,
        order if zeros is None else zeros.contiguous(),
        order if bias is None else bias,
        out,
        CHOSEN=num_chosen,
        K=inputs,
        N=outputs,
        E=values.shape[0],
        G=scales.shape[2],
        GROUP=group,
        KIND=kind,
        B=_LEAST_TILE if is_one else block,
        ONE_ROW=is_one,
        OF_TOKENS=of_tokens,
        GATED=is_gated,
        WORDS=are_words,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        EARLY=starts_early(),
        **tiling,
    )
    return out
