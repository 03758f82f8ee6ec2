"""An adapter on its way to ranks that follow: a line of JSON with its slot and shapes, then its factors' bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import torch

from mllm_compile.runtime.files.json_data import parse_json
from mllm_compile.runtime.lora.pool import Factors

_ALIGNED = 8  # of the first factor's bytes


def pack(slot: int, factors: Factors) -> Iterator[memoryview]:
    """The parts of a message.

    Args:
        factors: whole, on the CPU, of one type, which the receiver knows.
    """
    shapes = {weight: [list(one.shape) for one in pair] for weight, pair in factors.items()}
    head = json.dumps({"slot": slot, "shapes": shapes}).encode()
    yield memoryview(head + b" " * (-(len(head) + 1) % _ALIGNED) + b"\n")
    for pair in factors.values():
        for one in pair:
            yield one.reshape(-1).view(torch.uint8).numpy().data


def unpack(message: bytearray, dtype: torch.dtype) -> tuple[int, Factors]:
    """The slot and the factors of a message, which stays in use by them."""
    start = message.index(b"\n") + 1
    head = parse_json(bytes(message[:start]))
    factors: dict[str, tuple[torch.Tensor, ...]] = {}
    for weight, shapes in head["shapes"].items():
        pair = []
        for shape in shapes:
            count = math.prod(shape)
            pair.append(torch.frombuffer(message, dtype=dtype, count=count, offset=start).view(shape))
            start += count * dtype.itemsize
        factors[weight] = tuple(pair)
    return head["slot"], factors
