"""GGUF's block types: a row is a sequence of blocks, each with its scales and numbers of a few bits.

A weight is one tensor of uint8 [..., bytes of a row]. Its rows become float32, equal to the bit to what ggml computes
(ggml-quants.c): a product of scales is rounded to float32 before a number is multiplied by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from mllm_compile.runtime.quantised.numbers import exponents
from mllm_compile.runtime.weights.formats.base import VALUES, Format, Numbers, Roles, Stored, Tensors
from mllm_compile.runtime.weights.formats.settings import Settings
from mllm_compile.runtime.weights.gguf_header import BLOCK_TYPES, BlockType

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


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


def format_name(kind: BlockType) -> str:
    """The name of the format of a block type."""
    return f"gguf {kind.name.lower()}"


def decoded_rows(rows: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """float32 of rows of plain numbers, or of blocks: [..., bytes of a row] uint8."""
    if kind.dtype is not None:
        return rows.float()
    return _DECODERS[kind.name](rows.reshape(-1, kind.num_bytes)).view(*rows.shape[:-1], -1)


def _halves(blocks: torch.Tensor, begin: int, count: int = 1) -> torch.Tensor:
    """[M, count] float32: float16 numbers of each block."""
    return blocks[:, begin : begin + 2 * count].contiguous().view(torch.float16).float()


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


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_low_then_high(blocks[:, 2:]).float() - 8) * _halves(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _low_then_high(blocks[:, 4:]).float() * _halves(blocks, 0) + _halves(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return ((_low_then_high(blocks[:, 6:]) | _fifth_bits(blocks, 2)).float() - 16) * _halves(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _low_then_high(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return numbers.float() * _halves(blocks, 0) + _halves(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _halves(blocks, 0)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16]
    numbers = _bits(blocks[:, 16:80].unflatten(1, (2, 32)), 2, 4).reshape(-1, 16, 16).float()
    factors = (_halves(blocks, 80) * (scales & 15).float()).unsqueeze(-1)
    offsets = (_halves(blocks, 82) * (scales >> 4).float()).unsqueeze(-1)
    return (factors * numbers - offsets).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    is_set = _bits(blocks[:, :32], 1, 8).reshape(-1, 16, 16)
    numbers = _bits(blocks[:, 32:96].unflatten(1, (2, 32)), 2, 4).reshape(-1, 16, 16)
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    scales = _low_then_high(low) | (_bits(high, 2, 4).flatten(1) << 4)
    factors = (_halves(blocks, 108) * (scales.float() - 32)).unsqueeze(-1)
    return (factors * (numbers.float() - 4 * (1 - is_set.float()))).flatten(1)


def _six_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, 8, 1] each: the scales and the offsets of eight groups, of Q4_K and Q5_K."""
    first, second, third = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), 1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), 1)
    return (
        (_halves(blocks, 0) * scales.float()).unsqueeze(-1),
        (_halves(blocks, 2) * offsets.float()).unsqueeze(-1),
    )


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    factors, offsets = _six_bits(blocks)
    numbers = _bits(blocks[:, 16:].unflatten(1, (4, 32)), 4, 2).reshape(-1, 8, 32)
    return (factors * numbers.float() - offsets).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    factors, offsets = _six_bits(blocks)
    numbers = _bits(blocks[:, 48:].unflatten(1, (4, 32)), 4, 2).reshape(-1, 8, 32)
    numbers = numbers | (_bits(blocks[:, 16:48], 1, 8) << 4)
    return (factors * numbers.float() - offsets).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _bits(blocks[:, :128].unflatten(1, (2, 64)), 4, 2).reshape(-1, 256)
    high = _bits(blocks[:, 128:192].unflatten(1, (2, 32)), 2, 4).reshape(-1, 256)
    numbers = (low | (high << 4)).float() - 32
    factors = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    decoded: torch.Tensor = (factors.unsqueeze(-1) * numbers.unflatten(1, (16, 16))).flatten(1)
    return decoded


def _of_table(numbers: torch.Tensor, table: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(table, device=numbers.device, dtype=torch.float32)[numbers.int()]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks, 0) * _of_table(_low_then_high(blocks[:, 2:]), _IQ4)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    high = _bits(blocks[:, 2:4], 2, 4).transpose(1, 2).reshape(-1, 8)
    low = _bits(blocks[:, 4:8], 4, 2).transpose(1, 2).reshape(-1, 8)
    factors = _halves(blocks, 0) * ((low | (high << 4)).float() - 32)
    numbers = _low_then_high(blocks[:, 8:].unflatten(1, (8, 16)))
    return (factors.unsqueeze(-1) * _of_table(numbers, _IQ4)).flatten(1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    return exponents(blocks[:, :1]) * _of_table(_low_then_high(blocks[:, 1:]), _E2M1)


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
GGUF_FORMATS = tuple(GgufBlocks(kind) for kind in BLOCK_TYPES.values() if kind.dtype is None)
