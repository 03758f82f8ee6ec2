"""Chooses the kernel for a linear in few bits and a number of tokens; free of torch, so that passes can ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.ops.stream_linear.linear import TOKEN_BUCKETS
from mllm_compile.runtime.ops.stream_quantised import few as by_few
from mllm_compile.runtime.ops.stream_quantised import tiles as by_tiles
from mllm_compile.runtime.ops.stream_quantised.few import FewTiling
from mllm_compile.runtime.ops.stream_quantised.linear import GROUP, QuantisedKind, QuantisedTiling
from mllm_compile.runtime.ops.stream_quantised.tiles import TileTiling

MAX_TOKENS = by_tiles.MAX_TOKENS  # of a launch
BUCKETS = tuple(tokens for tokens in TOKEN_BUCKETS if tokens <= MAX_TOKENS)

# With more, and in large models with fewer, an fp8 weight with a scale a row is multiplied by fp8 inputs
# (passes/quantise_activations.py).
MAX_TOKENS_OF_ROWS = 64
_LAUNCHES = 2  # of four bits' kernels, at most
_ROWS_UNIT = 64  # what weights are multiples of
_MOST_COLUMNS = 32768  # scales of a tile's rows are in shared memory
# Scales and zero points of a row are copied four bytes at a time.
_COPY_BYTES = 4
_TILINGS = {tiling.source: tiling for tiling in (FewTiling, TileTiling)}


def is_streamed(kind: QuantisedKind, tokens: int) -> bool:
    """True if a weight divides into tiles, for up to `tokens` tokens."""
    fits = kind.rows % _ROWS_UNIT == 0 and kind.columns % kind.panel == 0
    fits &= kind.columns <= _MOST_COLUMNS
    fits &= _has_known_scales(kind) and tokens <= most_tokens(kind) and kind.rows * tokens < 2**31
    return fits and all(_is_few(kind, bucket) or by_tiles.takes(kind, bucket) for bucket in BUCKETS if bucket <= tokens)


def _is_few(kind: QuantisedKind, tokens: int) -> bool:
    """True if few.cu is for a bucket of tokens."""
    return tokens <= by_few.MAX_TOKENS and by_few.takes(kind, tokens)


def most_tokens(kind: QuantisedKind) -> int:
    """The most tokens that kernels read the weight as it is for.

    Four bits are read twice with more than a launch takes: otherwise they would be dequantised in each step.
    """
    if kind.values != "fp8":
        return _LAUNCHES * MAX_TOKENS
    return MAX_TOKENS if kind.group else MAX_TOKENS_OF_ROWS


def _has_known_scales(kind: QuantisedKind) -> bool:
    if kind.values == "fp8":
        return kind.group in (0, GROUP) and kind.scales == "float32" and not kind.zeros
    if kind.has_floats:
        return (kind.group, kind.scales) == ((32, "uint8") if kind.values == "mxfp4" else (16, "float8_e4m3fn"))
    if kind.group != GROUP or kind.scales not in ("bfloat16", "float16"):
        return False
    return not kind.zeros or kind.columns // GROUP % _COPY_BYTES == 0


def choose_tiling(kind: QuantisedKind, tokens: int) -> QuantisedTiling:
    """The tiling for a bucket of tokens."""
    return by_few.choose(kind, tokens) if _is_few(kind, tokens) else by_tiles.choose(kind, tokens)


def tiling_from_json(data: Mapping[str, Any]) -> QuantisedTiling:
    """Reads what `to_json` wrote. Raises KeyError or ValueError for anything else."""
    return from_json(_TILINGS[data["source"]], {name: value for name, value in data.items() if name != "source"})
