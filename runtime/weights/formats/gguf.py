"""GGUF's block types: a row is a sequence of blocks, each with its scales and numbers of a few bits.

A weight is one tensor of uint8 [..., bytes of a row]. Its rows become float32, equal to the bit to what ggml computes
(ggml-quants.c): a product of scales is rounded to float32 before a number is multiplied by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch

from mllm_compile.runtime.quantised.numbers import exponents, paired
from mllm_compile.runtime.quantised.scheme import INT4_ZERO, MXFP4, OFFSETS, SCALES, VALUES, WeightScheme
from mllm_compile.runtime.weights.formats.base import Format, Numbers, Roles, Stored, Tensors
from mllm_compile.runtime.weights.formats.settings import Settings
from mllm_compile.runtime.weights.gguf_header import BLOCK_TYPES, BlockType

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Parts(NamedTuple):
    """The content of M blocks of G groups each: number * scale, plus an offset in some types.

    Attributes:
        numbers: makes [M, block], integers; what asks for scales alone need not.
        scales: [M, G] float32.
        offsets: likewise, or None.
    """

    numbers: Callable[[], torch.Tensor]
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    def decoded(self) -> torch.Tensor:
        """[M, block] float32."""
        groups: torch.Tensor = self.numbers().float().unflatten(-1, (self.scales.shape[1], -1))
        weight = groups * self.scales.unsqueeze(-1)
        if self.offsets is not None:
            weight = weight + self.offsets.unsqueeze(-1)
        return weight.flatten(1)


class GgufBlocks(Format):
    """A weight in blocks of one type."""

    plain = ""
    roles: ClassVar[Roles] = {VALUES: ""}
    values_dtypes = (torch.uint8,)

    def __init__(self, kind: BlockType) -> None:
        self.name = format_name(kind)  # type: ignore[misc]  # an instance a type
        self._kind = kind

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        *rows, num_bytes = stored[VALUES].shape
        return (*rows, num_bytes // self._kind.num_bytes * self._kind.block), {}

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        return decoded_rows(tensors[VALUES][start:stop], self._kind)


class IntegerBlocks(GgufBlocks):
    """A weight in blocks of one type; memory holds the same integers, without loss."""

    def __init__(self, kind: BlockType) -> None:
        super().__init__(kind)
        self._parts, self._scheme = _INTEGERS[kind.name]

    def scheme(self, stored: Stored, shape: tuple[int, ...], numbers: Numbers) -> WeightScheme | None:
        return self._scheme

    def sources(self, role: str) -> tuple[str, ...]:
        return (VALUES,)

    def kept_tensor(self, role: str, tensors: Tensors, numbers: Numbers) -> torch.Tensor:
        stored = tensors[VALUES]
        parts = self._parts(stored.reshape(-1, self._kind.num_bytes))
        if role == SCALES:
            made = parts.scales
        elif role == OFFSETS:
            assert parts.offsets is not None, "the scheme has offsets"
            made = parts.offsets
        elif self._scheme.name == "int4":
            made = paired(
                parts.numbers() if parts.offsets is not None else parts.numbers().add(INT4_ZERO).to(torch.uint8)
            )
        else:
            made = parts.numbers()
        return made.reshape(*stored.shape[:-1], -1)


class FloatBlocks(GgufBlocks):
    """A weight in MXFP4; memory holds the same floats and powers of two."""

    def scheme(self, stored: Stored, shape: tuple[int, ...], numbers: Numbers) -> WeightScheme | None:
        return MXFP4

    def sources(self, role: str) -> tuple[str, ...]:
        return (VALUES,)

    def kept_tensor(self, role: str, tensors: Tensors, numbers: Numbers) -> torch.Tensor:
        stored = tensors[VALUES]
        blocks = stored.reshape(-1, self._kind.num_bytes)
        made = blocks[:, :1] if role == SCALES else paired(_low_then_high(blocks[:, 1:]))
        return made.reshape(*stored.shape[:-1], -1)


def format_name(kind: BlockType) -> str:
    """The name of the format of a block type."""
    return f"gguf {kind.name.lower()}"


def decoded_rows(rows: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """float32 of rows of plain numbers, or of blocks: [..., bytes of a row] uint8."""
    if kind.dtype is not None:
        return rows.float()
    blocks = rows.reshape(-1, kind.num_bytes)
    decoded = _INTEGERS[kind.name][0](blocks).decoded() if kind.name in _INTEGERS else _mxfp4(blocks)
    return decoded.view(*rows.shape[:-1], -1)


def _halves(blocks: torch.Tensor, begin: int, count: int = 1) -> torch.Tensor:
    """[M, count] float32: float16 numbers of each block."""
    return blocks.view(torch.float16)[:, begin // 2 : begin // 2 + count].float()


def _low_then_high(packed: torch.Tensor) -> torch.Tensor:
    """[..., 2 B] of [..., B]: the low four bits of all bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """[..., count, B] of [..., B] bytes: their lowest `width` bits, the next ones, and so on."""
    shifts = torch.arange(0, width * count, width, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    return (packed.unsqueeze(-2) >> shifts) & ((1 << width) - 1)


def _fifth_bits(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """[M, 32]: the bits of four bytes, the lowest first, in the place of 16."""
    return _bits(blocks[:, begin : begin + 4], 1, 8).transpose(1, 2).reshape(-1, 32) << 4


def _q4_0(blocks: torch.Tensor) -> Parts:
    return Parts(lambda: _signed(_low_then_high(blocks[:, 2:]), 8), _halves(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Parts:
    return Parts(lambda: _low_then_high(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Parts:
    return Parts(lambda: _signed(_low_then_high(blocks[:, 6:]) | _fifth_bits(blocks, 2), 16), _halves(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Parts:
    return Parts(lambda: _low_then_high(blocks[:, 8:]) | _fifth_bits(blocks, 4), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Parts:
    return Parts(lambda: blocks[:, 2:].view(torch.int8), _halves(blocks, 0))


def _q2_k(blocks: torch.Tensor) -> Parts:
    scales = blocks[:, :16]
    factors, offsets = _halves(blocks, 80) * (scales & 15).float(), -(_halves(blocks, 82) * (scales >> 4).float())
    return Parts(lambda: _bits(blocks[:, 16:80].unflatten(1, (2, 32)), 2, 4).flatten(1), factors, offsets)


def _q3_k(blocks: torch.Tensor) -> Parts:
    def numbers() -> torch.Tensor:
        is_set = _bits(blocks[:, :32], 1, 8).flatten(1)
        return _signed(_bits(blocks[:, 32:96].unflatten(1, (2, 32)), 2, 4).flatten(1) | is_set << 2, 4)

    low, high = blocks[:, 96:104], blocks[:, 104:108]
    scales = _low_then_high(low) | (_bits(high, 2, 4).flatten(1) << 4)
    return Parts(numbers, _halves(blocks, 108) * (scales.float() - 32))


def _six_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, 8] each: the scales and the offsets of eight groups, of Q4_K and Q5_K."""
    first, second, third = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), 1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), 1)
    return _halves(blocks, 0) * scales.float(), -(_halves(blocks, 2) * offsets.float())


def _q4_k(blocks: torch.Tensor) -> Parts:
    return Parts(lambda: _bits(blocks[:, 16:].unflatten(1, (4, 32)), 4, 2).flatten(1), *_six_bits(blocks))


def _q5_k(blocks: torch.Tensor) -> Parts:
    def numbers() -> torch.Tensor:
        fifth = _bits(blocks[:, 16:48], 1, 8).flatten(1) << 4
        return _bits(blocks[:, 48:].unflatten(1, (4, 32)), 4, 2).flatten(1) | fifth

    return Parts(numbers, *_six_bits(blocks))


def _q6_k(blocks: torch.Tensor) -> Parts:
    def numbers() -> torch.Tensor:
        low = _bits(blocks[:, :128].unflatten(1, (2, 64)), 4, 2).flatten(1)
        high = _bits(blocks[:, 128:192].unflatten(1, (2, 32)), 2, 4).flatten(1)
        return _signed(low | (high << 4), 32)

    factors = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Parts(numbers, factors)


def _signed(numbers: torch.Tensor, zero: int) -> torch.Tensor:
    """int8 of numbers in uint8 below 128; `zero` stands for zero."""
    return numbers.to(torch.int8) - zero


def _of_table(numbers: torch.Tensor, table: tuple[float, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(table, device=numbers.device, dtype=dtype)[numbers.int()]


def _iq4_nl(blocks: torch.Tensor) -> Parts:
    return Parts(lambda: _of_table(_low_then_high(blocks[:, 2:]), _IQ4, torch.int8), _halves(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    high = _bits(blocks[:, 2:4], 2, 4).transpose(1, 2).reshape(-1, 8)
    low = _bits(blocks[:, 4:8], 4, 2).transpose(1, 2).reshape(-1, 8)
    factors = _halves(blocks, 0) * ((low | (high << 4)).float() - 32)
    numbers = blocks[:, 8:].unflatten(1, (8, 16))
    return Parts(lambda: _of_table(_low_then_high(numbers).flatten(1), _IQ4, torch.int8), factors)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    return exponents(blocks[:, :1]) * _of_table(_low_then_high(blocks[:, 1:]), _E2M1)


_HALF, _FLOAT = torch.float16, torch.float32
# Block type → what its blocks hold, and the scheme that holds the same. Products of two scales take float32.
_INTEGERS: dict[str, tuple[Callable[[torch.Tensor], Parts], WeightScheme]] = {
    "Q4_0": (_q4_0, WeightScheme("int4", 32, _HALF)),
    "Q4_1": (_q4_1, WeightScheme("int4_offsets", 32, _HALF)),
    "Q5_0": (_q5_0, WeightScheme("int8", 32, _HALF)),
    "Q5_1": (_q5_1, WeightScheme("int8_offsets", 32, _HALF)),
    "Q8_0": (_q8_0, WeightScheme("int8", 32, _HALF)),
    "Q2_K": (_q2_k, WeightScheme("int4_offsets", 16, _FLOAT)),
    "Q3_K": (_q3_k, WeightScheme("int8", 16, _FLOAT)),
    "Q4_K": (_q4_k, WeightScheme("int4_offsets", 32, _FLOAT)),
    "Q5_K": (_q5_k, WeightScheme("int8_offsets", 32, _FLOAT)),
    "Q6_K": (_q6_k, WeightScheme("int8", 16, _FLOAT)),
    "IQ4_NL": (_iq4_nl, WeightScheme("int8", 32, _HALF)),
    "IQ4_XS": (_iq4_xs, WeightScheme("int8", 32, _FLOAT)),
}
_BY_KIND = {
    kind.name: IntegerBlocks(kind) if kind.name in _INTEGERS else FloatBlocks(kind)
    for kind in BLOCK_TYPES.values()
    if kind.dtype is None
}
GGUF_FORMATS = tuple(_BY_KIND.values())


def format_of(kind: BlockType) -> GgufBlocks:
    """The format of a weight in these blocks."""
    return _BY_KIND[kind.name]
