"""Compares products of few rows by kernels of ours with those of many, to the last bit, while a model is compiled.

What the library's kernels do is written nowhere. Where a bit differs, deterministic steps have the library's least
number of rows (rows.py tries these).

Shape legend: N outputs and K inputs of a linear.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mllm_compile.runtime.config_sections import LEAST_ROWS
from mllm_compile.runtime.device.open import sum_in_one_order
from mllm_compile.runtime.ops import Kernels, load_kernels, op
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind
from mllm_compile.runtime.ops.stream_linear.undivided import BUCKETS, UndividedTiling

FAMILY = "one_order"
_OF_MANY = "gated_linear"  # the family that multiplies many gates and ups
_COUNTS = tuple(sorted({1, *BUCKETS, *(tokens - 1 for tokens in BUCKETS), *(tokens // 2 + 1 for tokens in BUCKETS)}))
_MOST = 2 * LEAST_ROWS


def compared(kernels: Kernels) -> Kernels:
    """The kernels of a program that `unlike_few_rows` takes."""
    return {name: kernels[name] for name in (FAMILY, _OF_MANY) if name in kernels} if FAMILY in kernels else {}


def unlike_few_rows(kernels: Kernels, binaries: Mapping[str, bytes], device: str) -> str | None:
    """Tries each linear with random weights: the one whose rows differ among few and many; None: all are alike.

    Args:
        kernels: as `compared` gives them.
        binaries: theirs, by name.
    """
    sum_in_one_order()
    load_kernels(kernels, binaries, torch.device(device))
    tilings = (one for one in kernels.get(FAMILY, ()) if isinstance(one, UndividedTiling))
    kinds = dict.fromkeys((one.kind, one.ahead_bytes) for one in tilings)
    return next((unlike for kind, ahead in kinds if (unlike := _unlike(kind, ahead, device)) is not None), None)


def _unlike(kind: LinearKind, ahead_bytes: int, device: str) -> str | None:
    generator = torch.Generator(device).manual_seed(0)
    shapes = (_MOST, kind.columns), (kind.rows, kind.columns), (kind.rows,)
    x, weight, bias = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes)
    ahead = torch.zeros(1, ahead_bytes // 2, device=device, dtype=torch.bfloat16) if ahead_bytes else None
    operands: tuple[torch.Tensor | None, ...] = (weight, bias if kind.bias else None, ahead)
    product = op("linear_in_one_order")
    if kind.gated:
        product, operands = op("gated_linear_in_one_order"), (weight / kind.columns**0.5,)
    whole = product(x, *operands)
    for count in _COUNTS:
        for rows in (slice(count), slice(LEAST_ROWS, LEAST_ROWS + count)):
            if not torch.equal(product(x[rows], *operands), whole[rows]):
                return f"a product of {count} rows with a weight of {kind.rows} x {kind.columns}"
    return None
