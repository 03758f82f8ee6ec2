"""A 64-bit sum over the bytes of each weight, computed where the weight is.

Packed weights are compared with it at every start, on the device: a GPU reads its memory a hundred times as fast as a
core computes sha256. A change within one word is always found, any other missed by chance alone (2^-64). It finds
damage, not forgery: anyone who can write the weights can write their sums too; the files' owner and mode protect
against that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, repeat

import torch

_ROW_WORDS = 8192  # one row of 64-bit words is one sum of products
_BLOCK_ROWS = 512  # rows at a time: 32 MiB of the device are between two kernels
_CACHED_ROWS = 3  # on a CPU: they stay in its cache, and are too few for torch to divide them among threads
_THREADS = 16
_MIX = (-7046029254386353131, -4658895280553007687)  # odd, as 64-bit numbers with a sign


def weight_sums(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sum of each weight's bytes, by name; the same on every device.

    Args:
        weights: contiguous, all on one device.
    """
    with torch.inference_mode():
        words = {name: _words(weight) for name, weight in weights.items()}
        most_rows = max((len(rows) for rows in words.values()), default=0)
        device = next(iter(weights.values())).device if weights else torch.device("cpu")
        places = _multipliers(most_rows, device), _multipliers(_ROW_WORDS, device)
        sums = _sums(list(words.values()), *places)
        values = torch.stack(sums).tolist() if sums else []
    return {name: value + weights[name].nbytes for name, value in zip(weights, values, strict=True)}


def _words(weight: torch.Tensor) -> torch.Tensor:
    """[rows, _ROW_WORDS] int64 of the weight's bytes; a copy with zeros behind where they do not fill the last row."""
    data = weight.detach().reshape(-1).view(torch.uint8)
    missing = -data.numel() % (8 * _ROW_WORDS)
    if missing or data.storage_offset() % 8 or data.data_ptr() % 8:  # memory that others give begins anywhere
        data = torch.nn.functional.pad(data, (0, missing))
    return data.view(torch.int64).view(-1, _ROW_WORDS)


def _sums(words: list[torch.Tensor], of_rows: torch.Tensor, of_columns: torch.Tensor) -> list[torch.Tensor]:
    """[] int64 each: the products of words and of the multipliers of their places, modulo 2^64."""
    blocks = [block for rows in words for block in rows.split(_BLOCK_ROWS)]
    if of_rows.device.type == "cpu":
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "sums") as threads:
            summed = iter(list(threads.map(_row_sums_on_cpu, blocks, repeat(of_columns))))
    else:
        summed = ((block * of_columns).sum(1) for block in blocks)
    return [
        (torch.cat(list(islice(summed, -(-len(rows) // _BLOCK_ROWS) or 1))) * of_rows[: len(rows)]).sum()
        for rows in words
    ]


def _row_sums_on_cpu(block: torch.Tensor, of_columns: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([(rows * of_columns).sum(1) for rows in block.split(_CACHED_ROWS)])


def _multipliers(count: int, device: torch.device) -> torch.Tensor:
    """[count] int64, odd and without a pattern."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor in _MIX:
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> 29)
    return mixed * 2 + 1
