"""Rows times their experts' weights in few bits, a block of rows and a tile of columns a program; with silu(gate) * up.

As grouped.py, with two differences. A weight is read as it is in memory and becomes the activations' type in
registers: so it, and not the rows, is the product's first operand, which tensor cores take from there. And it is read
in units of four inputs, as words are what instructions take: of the units' first inputs, their second ones, and so on,
each is a product of its own.

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


# Two units at a time as bfloat16, where Triton's own operations would take each number by itself. Of each result the
# lower half is of the first unit.
# On one line: Inductor writes a kernel's constants into a string of its source, where a line must not end within one.
#
# E4M3: as the last bits of an exponent and the first of a mantissa a byte's are a number 2^120 times smaller (as in
# cuda/e4m3.cuh).
_FROM_E4M3 = tl.constexpr(
    "{ "
    "prmt.b32 $0, $4, $5, 0xc480; "
    "prmt.b32 $1, $4, $5, 0xd591; "
    "prmt.b32 $2, $4, $5, 0xe6a2; "
    "prmt.b32 $3, $4, $5, 0xf7b3; "
    "shl.b32 $0, $0, 4; "
    "shl.b32 $1, $1, 4; "
    "shl.b32 $2, $2, 4; "
    "shl.b32 $3, $3, 4; "
    "and.b32 $0, $0, 0x87f087f0; "
    "and.b32 $1, $1, 0x87f087f0; "
    "and.b32 $2, $2, 0x87f087f0; "
    "and.b32 $3, $3, 0x87f087f0; "
    "}"
)
# Unsigned integers of four bits, and zero points: an integer below 128 is in the last bits of 128 + integer.
_FROM_INT4 = tl.constexpr(
    "{ "
    ".reg .b32 one, b, c, d; "
    "mov.b32 one, 0x3f803f80; "
    "shr.b32 b, $4, 4; "
    "shr.b32 c, $4, 8; "
    "shr.b32 d, $4, 12; "
    "lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 $1, b, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 $2, c, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 $3, d, 0x000f000f, 0x43004300, 0xea; "
    "fma.rn.bf16x2 $0, $0, one, $5; "
    "fma.rn.bf16x2 $1, $1, one, $5; "
    "fma.rn.bf16x2 $2, $2, one, $5; "
    "fma.rn.bf16x2 $3, $3, one, $5; "
    "}"
)
# E2M1 times powers of two: as E4M3, a number 2^126 times smaller. The last factor is -0, so that these are products.
_FROM_E2M1 = tl.constexpr(
    "{ "
    ".reg .b32 none, s; "
    "mov.b32 none, 0x80008000; "
    "shl.b32 $0, $4, 6; "
    "shl.b32 s, $4, 12; "
    "and.b32 $0, $0, 0x01c001c0; "
    "lop3.b32 $0, $0, s, 0x80008000, 0xf8; "
    "shl.b32 $1, $4, 2; "
    "shl.b32 s, $4, 8; "
    "and.b32 $1, $1, 0x01c001c0; "
    "lop3.b32 $1, $1, s, 0x80008000, 0xf8; "
    "shr.b32 $2, $4, 2; "
    "shl.b32 s, $4, 4; "
    "and.b32 $2, $2, 0x01c001c0; "
    "lop3.b32 $2, $2, s, 0x80008000, 0xf8; "
    "shr.b32 $3, $4, 6; "
    "and.b32 $3, $3, 0x01c001c0; "
    "lop3.b32 $3, $3, $4, 0x80008000, 0xf8; "
    "fma.rn.bf16x2 $0, $0, $5, none; "
    "fma.rn.bf16x2 $1, $1, $5, none; "
    "fma.rn.bf16x2 $2, $2, $5, none; "
    "fma.rn.bf16x2 $3, $3, $5, none; "
    "}"
)
# Inputs, four in a word of 64 bits, times a power of two.
_FROM_WORDS = tl.constexpr(
    "{ "
    ".reg .b32 a, b, c, d, none; "
    "mov.b32 none, 0x80008000; "
    "mov.b64 {a, b}, $4; "
    "mov.b64 {c, d}, $5; "
    "prmt.b32 $0, a, c, 0x5410; "
    "prmt.b32 $1, a, c, 0x7632; "
    "prmt.b32 $2, b, d, 0x5410; "
    "prmt.b32 $3, b, d, 0x7632; "
    "fma.rn.bf16x2 $0, $0, $6, none; "
    "fma.rn.bf16x2 $1, $1, $6, none; "
    "fma.rn.bf16x2 $2, $2, $6, none; "
    "fma.rn.bf16x2 $3, $3, $6, none; "
    "}"
)
_UNIT = tl.constexpr(4)


@triton.jit
def _inputs(
    words: tl.tensor, power: tl.tensor, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The inputs of units, the first ones, the second ones and so on, in bfloat16 times a power of two."""
    if dtype == tl.bfloat16:
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        power = tl.broadcast_to(tl.full((1, 1), power, tl.float32).to(tl.bfloat16), words.shape)
        operands: tl.constexpr = "=&r,=&r,=&r,=&r,l,l,r"
        inputs = tl.inline_asm_elementwise(_FROM_WORDS, operands, [words, power], types, is_pure=True, pack=2)
    else:
        inputs = (
            (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True),
            ((words >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True),
            ((words >> 32) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True),
            ((words >> 48) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True),
        )
    return inputs


@triton.jit
def _eight_bit_float(codes: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    bits = ((codes & 0x7F).to(tl.uint32) << 20) | ((codes & 0x80).to(tl.uint32) << 24)
    larger = tl.full((1, 1), 1.329227995784916e36, tl.float32)  # 2^120
    return (bits.to(tl.float32, bitcast=True) * larger).to(dtype)


@triton.jit
def _eight_bit_floats(units: tl.tensor, dtype: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """E4M3 of units of 32 bits, exactly; in bfloat16 2^120 times smaller."""
    if dtype == tl.bfloat16:
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        operands: tl.constexpr = "=&r,=&r,=&r,=&r,r,r"
        numbers = tl.inline_asm_elementwise(_FROM_E4M3, operands, [units], types, is_pure=True, pack=2)
    else:
        numbers = (
            _eight_bit_float(units, dtype),
            _eight_bit_float(units >> 8, dtype),
            _eight_bit_float(units >> 16, dtype),
            _eight_bit_float(units >> 24, dtype),
        )
    return numbers


@triton.jit
def _integers(
    units: tl.tensor, zeros: tl.tensor, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Four bits of units of 16 less their zero points, exactly."""
    if dtype == tl.bfloat16:
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        less = tl.broadcast_to((-128.0 - zeros).to(tl.bfloat16), units.shape)
        operands: tl.constexpr = "=&r,=&r,=&r,=&r,r,r"
        numbers = tl.inline_asm_elementwise(_FROM_INT4, operands, [units, less], types, is_pure=True, pack=2)
    else:
        numbers = (
            ((units & 15).to(tl.float32) - zeros).to(dtype),
            (((units >> 4) & 15).to(tl.float32) - zeros).to(dtype),
            (((units >> 8) & 15).to(tl.float32) - zeros).to(dtype),
            (((units >> 12) & 15).to(tl.float32) - zeros).to(dtype),
        )
    return numbers


@triton.jit
def powers_of_two(codes: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Powers of two of E8M0, for `_four_bit_floats`; in bfloat16 2^63 times larger, and at most 2^127 then."""
    if dtype == tl.bfloat16:
        powers = ((tl.minimum(codes.to(tl.int32), 191) + 63) << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # the smallest is half of the smallest normal number
        powers = tl.where(codes == 0, 0x400000, codes.to(tl.uint32) << 23).to(tl.uint32).to(tl.float32, bitcast=True)
    return powers


@triton.jit
def four_bit_float(codes: tl.tensor, powers: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    bits = ((codes & 7).to(tl.uint32) << 22) | ((codes & 8).to(tl.uint32) << 28)
    larger = tl.full((1, 1), 8.507059173023462e37, tl.float32)  # 2^126
    return (bits.to(tl.float32, bitcast=True) * larger * powers).to(dtype)


@triton.jit
def _four_bit_floats(
    units: tl.tensor, powers: tl.tensor, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """E2M1 of units of 16 bits times powers of two, exactly; in bfloat16 2^126 times smaller."""
    if dtype == tl.bfloat16:
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        operands: tl.constexpr = "=&r,=&r,=&r,=&r,r,r"
        numbers = tl.inline_asm_elementwise(_FROM_E2M1, operands, [units, powers], types, is_pure=True, pack=2)
    else:
        numbers = (
            four_bit_float(units, powers, dtype),
            four_bit_float(units >> 4, powers, dtype),
            four_bit_float(units >> 8, powers, dtype),
            four_bit_float(units >> 12, powers, dtype),
        )
    return numbers


@triton.jit
def _add_products(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    w: tl.tensor,
    x: tl.tensor,
    y: tl.tensor,
    z: tl.tensor,
    total: tl.tensor,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    total = tl.dot(a, w, total, input_precision=PRECISION)
    total = tl.dot(b, x, total, input_precision=PRECISION)
    total = tl.dot(c, y, total, input_precision=PRECISION)
    return tl.dot(d, z, total, input_precision=PRECISION)


@triton.jit
def _quantised_linear_kernel(
    x_ptr: tl.tensor,
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
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
) -> None:
    """COLUMNS outputs of a block of rows; of a gated weight COLUMNS / 2, and as many rows of gate and of up.

    DEPTH inputs at once are of one group, or groups are of mxfp4. x is read in words of a unit if it is in 16 bits
    (WORDS).
    """
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    UNIT_TYPE: tl.constexpr = tl.int32 if KIND == "fp8" else tl.int16
    values_ptr = values_ptr.to(tl.pointer_type(UNIT_TYPE), bitcast=True)
    if WORDS:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    PARTS: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = COLUMNS // PARTS
    OUTPUTS: tl.constexpr = N * PARTS
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
            units = tl.arange(0, DEPTH // _UNIT)
            sources = (rows // CHOSEN if OF_TOKENS else rows).to(tl.int64)
            UNITS: tl.constexpr = K // _UNIT
            STRIDE: tl.constexpr = 1 if WORDS else _UNIT
            # x compensates the factor by which bits of bfloat16 are too small; for E4M3 the scales do so too.
            IS_SMALL: tl.constexpr = dtype == tl.bfloat16
            X_POWER: tl.constexpr = 2.0**60 if KIND == "fp8" else 2.0**63 if KIND == "mxfp4" else 1.0
            SCALE_POWER: tl.constexpr = 2.0**60 if KIND == "fp8" and IS_SMALL else 1.0
            x_at = x_ptr + (sources[None, :] * UNITS + units[:, None]) * STRIDE
            at = values_ptr + wide[:, None] * UNITS + units[None, :]
            # Scales are asked for a turn ahead: they come by no pipeline of Triton's.
            GROUPS: tl.constexpr = max(DEPTH // GROUP, 1)
            if KIND == "mxfp4":
                groups = tl.arange(0, GROUPS)[None, :]
                scales_at = scales_ptr + wide[:, None] * G + groups
                next_scales = tl.load(scales_at, mask=groups < G, other=0)
            else:
                scales_at = scales_ptr + wide * G
                next_scales = tl.load(scales_at)
                if HAS_ZEROS:
                    next_zeros = tl.load(zeros_ptr + wide * G)
            total = tl.zeros((COLUMNS, B), tl.float32)
            for start in range(0, UNITS, DEPTH // _UNIT):
                is_unit = units + start < UNITS
                # Lanes without a row read nothing: what they would is as much as the weight.
                is_input = is_row[None, :] & is_unit[:, None]
                words = tl.load(x_at + start * STRIDE, mask=is_input, other=0)
                if UNITS % (DEPTH // _UNIT) == 0:
                    values = tl.load(at + start)
                else:
                    values = tl.load(at + start, mask=is_unit[None, :], other=0)
                if WORDS:
                    w, x, y, z = _inputs(words, X_POWER, dtype)
                else:
                    w = words
                    x = tl.load(x_at + start * STRIDE + 1, mask=is_input, other=0)
                    y = tl.load(x_at + start * STRIDE + 2, mask=is_input, other=0)
                    z = tl.load(x_at + start * STRIDE + 3, mask=is_input, other=0)
                codes = next_scales
                next_group = (start * _UNIT + DEPTH) // GROUP
                if KIND == "mxfp4":
                    next_scales = tl.load(scales_at + next_group, mask=next_group + groups < G, other=0)  # type: ignore[possibly-undefined]  # KIND gave it
                elif G > 1:
                    next_scales = tl.load(scales_at + next_group, mask=next_group + wide * 0 < G, other=0.0)
                if KIND == "mxfp4":
                    powers = tl.broadcast_to(powers_of_two(codes, dtype)[:, :, None], (COLUMNS, GROUPS, GROUP // _UNIT))
                    a, b, c, d = _four_bit_floats(values, tl.reshape(powers, (COLUMNS, DEPTH // _UNIT)), dtype)
                    total = _add_products(a, b, c, d, w, x, y, z, total, PRECISION)
                else:
                    if KIND == "fp8":
                        a, b, c, d = _eight_bit_floats(values, dtype)
                    else:
                        zeros = tl.full((1, 1), 8.0, tl.float32)
                        if HAS_ZEROS:
                            zeros = next_zeros.to(tl.float32)[:, None]  # type: ignore[possibly-undefined]  # HAS_ZEROS gave it
                            if G > 1:
                                is_group = next_group + wide * 0 < G
                                next_zeros = tl.load(zeros_ptr + wide * G + next_group, mask=is_group, other=0)
                        a, b, c, d = _integers(values, zeros, dtype)
                    if G == 1:
                        total = _add_products(a, b, c, d, w, x, y, z, total, PRECISION)
                    else:
                        part = tl.zeros((COLUMNS, B), tl.float32)
                        part = _add_products(a, b, c, d, w, x, y, z, part, PRECISION)
                        total += part * (codes.to(tl.float32) * SCALE_POWER)[:, None]
            if KIND != "mxfp4" and G == 1:
                total = total * (next_scales.to(tl.float32) * SCALE_POWER)[:, None]
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
    ONE_ROW: (64, 128, 4, 4),
    16: (64, 128, 4, 4),
    32: (64, 128, 4, 4),
    128: (128, 64, 8, 3),
}
_LEAST_DEPTH = _LEAST_TILE * 4  # of four products


def _tiling(block: int, outputs: int, inputs: int, group: int, kind: str) -> dict[str, int]:
    """The kernel's sizes for a block; tiles of small weights are smaller, and loads under way fit the shared memory."""
    columns, num_bytes, warps, stages = next(tiling for most, tiling in _TILINGS.items() if block <= most)
    per_byte = 1 if kind == "fp8" else 2
    depth = num_bytes * per_byte
    while depth > _LEAST_DEPTH and (depth // 2 >= inputs or (kind != "mxfp4" and group < inputs and group % depth)):
        depth //= 2
    while columns > _LEAST_TILE and columns // 2 >= outputs:
        columns //= 2
    stage_bytes = (columns // per_byte + max(block, _LEAST_TILE) * 2) * depth
    resident = 2 if warps == 4 else 1  # blocks of a multiprocessor, at least: with more warps registers allow one
    stages = max(2, min(stages, most_shared_bytes() // (resident * stage_bytes)))
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
    tiling = _tiling(block, outputs * (2 if is_gated else 1), inputs, group, kind)
    width = tiling["COLUMNS"] // (2 if is_gated else 1)
    wrap_triton(_quantised_linear_kernel)[(num_blocks * ((outputs + width - 1) // width),)](
        x,
        order,
        order if blocks is None else blocks,
        values,
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
        WORDS=x.element_size() == 2,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        EARLY=starts_early(),
        **tiling,
    )
    return out
