"""An update on its way to ranks that follow: a line of JSON with what is to be done, then a tensor's bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.files.json_data import parse_json
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.runtime.updates.session import WeightUpdate

_BEGIN = b'{"update": '
_ALIGNED = 16  # of a tensor's bytes


def pack(what: str, tensors: Sequence[torch.Tensor] = (), **details: Any) -> Iterator[memoryview]:
    """The parts of a message.

    Args:
        what: begin, take, delta, prepare, swap or drop.
        tensors: on any device; aligned in the message.
    """
    kinds = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in tensors]
    head = json.dumps({"update": what, "tensors": kinds, **details}).encode()
    yield memoryview(head + b" " * (-(len(head) + 1) % _ALIGNED) + b"\n")
    for one in tensors:
        data = one.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield data.numpy().data
        yield memoryview(bytes(-data.numel() % _ALIGNED))


def is_update(message: bytearray) -> bool:
    """True if it is one of these."""
    return message.startswith(_BEGIN)


class FollowedUpdate:
    """Does on a rank that follows as rank 0, which has checked all, says. An error here ends the rank, but for a lack
    of memory, which rank 0 hears of before it swaps.

    Args:
        vote: gives this rank's number to all ranks, which give theirs.
    """

    def __init__(self, live: LiveWeights, vote: Callable[[int], object]) -> None:
        self._live, self._vote = live, vote
        self._update: WeightUpdate | None = None
        self._has_room = True

    def take(self, message: bytearray) -> None:
        """Does what a message says; it stays in use by the tensors."""
        start = message.index(b"\n") + 1
        head = parse_json(bytes(message[:start]))
        tensors = []
        for kind, shape in head["tensors"]:
            dtype = getattr(torch, kind)
            count = math.prod(shape)
            flat = (
                torch.frombuffer(message, dtype=dtype, count=count, offset=start)
                if count
                else torch.empty(0, dtype=dtype)
            )
            tensors.append(flat.view(shape))
            start += -(-count * dtype.itemsize // _ALIGNED) * _ALIGNED
        self._do(head, tensors)

    def _do(self, head: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        what = head["update"]
        if what == "begin":
            self._has_room = True
            self._update = WeightUpdate(
                self._live, is_direct=head["is_direct"], is_partial=head["is_partial"], names=head["names"]
            )
            return
        update = self._update
        assert update is not None, "rank 0 begins ahead of all else"
        if what == "swap":
            update.swap()
        elif what == "drop":
            update.drop()
        else:
            self._fill(update, what, head, tensors)

    def _fill(self, update: WeightUpdate, what: str, head: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Takes tensors, or checks them; without room it waits for the end."""
        try:
            if not self._has_room:
                pass
            elif what == "take":
                update.take(head["name"], tensors[0])
            elif what == "delta":
                update.take_delta(head["name"], *tensors)
            else:
                update.check_complete()
                update.prepare()
        except DeviceMemoryError:
            self._has_room = False
            update.drop()
        if what == "prepare":
            self._vote(int(self._has_room))
