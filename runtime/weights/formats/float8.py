"""Eight-bit floats times scales: of a block, of a row, or of the whole weight."""

from __future__ import annotations

from typing import ClassVar

import torch

from mllm_compile.runtime.quantised.numbers import exponents
from mllm_compile.runtime.quantised.scheme import WeightScheme
from mllm_compile.runtime.weights.formats.base import (
    FLOATS,
    VALUES,
    Format,
    Numbers,
    Roles,
    Stored,
    Tensors,
    check_dims,
    check_dtype,
    misfit,
    positive,
)
from mllm_compile.runtime.weights.formats.settings import ROW, WEIGHT, Settings

_NAMES = {WEIGHT: "weight", ROW: "row"}


class BlockFloat8(Format):
    """Transformers' `fp8`: blocks of [128, 128], or one scale; experts one by one, or stacked [E, N, K]."""

    name = "fp8"
    plain = ""
    roles: ClassVar[Roles] = {
        VALUES: "",
        "scales": "_scale_inv",
    }  # despite its name: the weight is value · scale
    values_dtypes = (torch.float8_e4m3fn,)
    as_stored = frozenset({VALUES})
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = (*FLOATS, torch.float8_e8m0fnu, torch.uint8)
    rounds_to_scales: ClassVar[bool] = False
    further_blocks: ClassVar[tuple[tuple[int, int], ...]] = ()  # beside those that the config names

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        values, scales = stored[VALUES], stored["scales"]
        check_dims(values, 2, 3)
        check_dtype(scales, *self.scale_dtypes)
        *experts, rows, columns = values.shape
        known = (*settings.blocks, *self.further_blocks)
        for block_rows, block_columns in ((block[0] or rows, block[1] or columns) for block in known):
            blocks = -(-rows // block_rows), -(-columns // block_columns)
            is_one = blocks == (1, 1) and scales.shape in ((), (1,))
            is_flat = blocks == (rows, 1) and scales.shape == (rows,) and not experts
            if is_one or is_flat or scales.shape == (*experts, *blocks):
                return values.shape, {"rows": rows, "block_rows": block_rows, "block_columns": block_columns}
        said = " or ".join(_NAMES.get(block, f"block of {block[0]} x {block[1]}") for block in known)
        raise misfit(scales, values, f"the config says a scale a {said}")

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        values, scales = tensors[VALUES][start:stop], tensors["scales"]
        scales = positive(scales if self.rounds_to_scales else exponents(scales))
        if scales.numel() > 1:
            scales = scales.unsqueeze(-1) if scales.dim() == 1 else scales
            is_stacked = values.dim() == 3
            scales = scales[start:stop] if is_stacked else scales
            first, last = (0, values.shape[1]) if is_stacked else (start, stop)
            scales = _of_blocks(scales, -2, first, last, int(numbers["block_rows"]))
            scales = _of_blocks(scales, -1, 0, values.shape[-1], int(numbers["block_columns"]))
        else:
            scales = scales.reshape(())
        return values.to(scales.dtype) * scales

    def scheme(self, stored: Stored, shape: tuple[int, ...], numbers: Numbers) -> WeightScheme | None:
        return WeightScheme("fp8", min(int(numbers["block_columns"]), shape[-1]))

    def kept_tensor(self, role: str, tensors: Tensors, numbers: Numbers) -> torch.Tensor:
        """Scales of blocks and of the whole weight become scales of rows."""
        if role == VALUES:
            return tensors[VALUES]
        scales, rows = positive(exponents(tensors["scales"])), int(numbers["rows"])
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(rows, 1)
        scales = scales.unsqueeze(-1) if scales.dim() == 1 else scales
        return _of_blocks(scales, -2, 0, rows, int(numbers["block_rows"]))


class ScaledFloat8(BlockFloat8):
    """Also called `fp8`: AutoFP8's, and embeddings beside linears in blocks; the scale, of a weight or row, is named as
    compressed-tensors names it."""

    name = "fp8 by weight_scale"
    plain = ".weight"
    roles: ClassVar[Roles] = {VALUES: ".weight", "scales": ".weight_scale"}
    scale_dtypes = FLOATS
    further_blocks = (WEIGHT, ROW)


class CompressedFloat8(BlockFloat8):
    """compressed-tensors' `float-quantized`, which computes in the scales' type."""

    name = "compressed-tensors fp8"
    plain = ".weight"
    roles: ClassVar[Roles] = {VALUES: ".weight", "scales": ".weight_scale"}
    scale_dtypes = FLOATS
    rounds_to_scales = True


class ModelOptFloat8(BlockFloat8):
    """ModelOpt's `FP8` and `FP8_PER_CHANNEL_PER_TOKEN`."""

    name = "modelopt fp8"
    plain = ".weight"
    roles: ClassVar[Roles] = {VALUES: ".weight", "scales": ".weight_scale"}
    scale_dtypes = FLOATS


def _of_blocks(scales: torch.Tensor, dim: int, start: int, stop: int, size: int) -> torch.Tensor:
    """The scale of each place from `start` to `stop`."""
    places = torch.arange(start, stop, device=scales.device)
    return scales.index_select(dim, places // size)
