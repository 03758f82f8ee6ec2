"""Chooses the kernel for an fp8 linear and a number of tokens; free of torch, so that passes can ask anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from mllm_compile.runtime.json_data import from_json
from mllm_compile.runtime.ops.stream_fp8 import few as by_few
from mllm_compile.runtime.ops.stream_fp8.few import FewTiling
from mllm_compile.runtime.ops.stream_fp8.linear import GROUP, Fp8Kind, Fp8Tiling
from mllm_compile.runtime.ops.stream_linear.linear import TOKEN_BUCKETS
from mllm_compile.runtime.ops.stream_linear.shapes import is_head

MAX_FP8_TOKENS = by_few.MAX_TOKENS
FP8_BUCKETS = tuple(tokens for tokens in TOKEN_BUCKETS if tokens <= MAX_FP8_TOKENS)

_ROWS_UNIT = 64  # what weights are multiples of; of columns they have whole groups
_TILINGS = {tiling.source: tiling for tiling in (FewTiling,)}


def is_streamed(rows: int, columns: int, tokens: int) -> bool:
    """True if a weight [rows, columns] divides into tiles, for up to `tokens` tokens. A head does not: its sums of so
    many rows have no room."""
    fits = rows % _ROWS_UNIT == 0 and columns % GROUP == 0 and not is_head(rows)
    return fits and tokens <= MAX_FP8_TOKENS and rows * tokens < 2**31


def choose_tiling(kind: Fp8Kind, tokens: int) -> Fp8Tiling:
    """The tiling for a bucket of tokens."""
    return by_few.choose(kind)


def tiling_from_json(data: Mapping[str, Any]) -> Fp8Tiling:
    """Reads what `to_json` wrote. Raises KeyError or ValueError for anything else."""
    return from_json(_TILINGS[data["source"]], {name: value for name, value in data.items() if name != "source"})


def sweep_tilings(kind: Fp8Kind, tokens: int) -> Iterator[tuple[str, Fp8Tiling]]:
    """Other tilings for a bucket of tokens, with a name each that says how they divide any linear."""
    for split, piece, resident, lead in itertools.product((1, 2), (1024, 2048), (2, 1), (0, 2, 1 << 20)):
        tiling = by_few.divide(kind, piece=piece, resident=resident, lead=lead, split=split)
        if tiling is not None:
            yield f"split {split}, pieces of {piece}, {resident} resident, lead {lead}", tiling
