"""Shares a device out among models before the first one starts: tokens of each KV cache, or why one cannot be served.

Models that all fit are side by side, and their caches have the same number of tokens, as far as each has use for them.
Else they take turns. Each gets a half of what pinned models leave, or as many parts as may be awake beside these; or
all of it where that is too little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.server.wire.messages import Needs

_PARTS = 2  # of what is left, where models take turns


@dataclass(frozen=True)
class Share:
    """The memory that a model may take.

    Attributes:
        kv_tokens: of its cache.
        held_bytes, awake_bytes: of the device, for good and while it runs; estimates until its engine has told them.
    """

    kv_tokens: int
    held_bytes: int
    awake_bytes: int


@dataclass(frozen=True)
class Device:
    """
    Attributes:
        num_bytes: for all models together.
        kv_bytes: of these, for KV caches.
        parks: a parked engine gives memory back; a CPU's keeps it.
    """

    num_bytes: int
    kv_bytes: int
    parks: bool

    @classmethod
    def of(cls, needs: Collection[Needs]) -> Device:
        """The device that all of these are on."""
        last = min(needs, key=lambda one: one.free_bytes)  # its process was begun last: all contexts are there
        least = min(one.usable_bytes for one in needs)
        return cls(least, min(last.kv_bytes, least), any(not one.device.startswith("cpu") for one in needs))


def shares_of(needs: Mapping[str, Needs], pinned: Collection[str], most_awake: int | None) -> Mapping[str, Share | str]:
    """Name → its share, or why it has none.

    Args:
        needs: of the models of one device, in the order in which they are served.
        most_awake: models that run at once, pinned ones among them; None: as many as fit.
    """
    device = Device.of(needs.values())
    room = device.num_bytes - sum(one.process_bytes for one in needs.values())
    if device.parks and (sum(map(_least, needs.values())) > room or (most_awake or len(needs)) < len(needs)):
        num_pinned = sum(name in pinned for name in needs)
        parts = _PARTS if most_awake is None else max(1, most_awake - num_pinned)  # pinned ones are awake always
        return _in_turns(needs, pinned, parts, room)
    served: dict[str, Needs] = {}
    refused: dict[str, str] = {}
    for name, one in needs.items():
        left = room - sum(map(_least, served.values()))
        if _least(one) > left:
            refused[name] = _does_not_fit(one, left, "beside the others, whose memory stays theirs on a CPU")
        else:
            served[name] = one
    tokens = _even_tokens(served, min(device.kv_bytes, room - sum(one.fixed_bytes for one in served.values())))
    given = {name: _share(one, tokens[name]) for name, one in served.items()}
    return {name: given.get(name) or refused[name] for name in needs}


def _in_turns(needs: Mapping[str, Needs], pinned: Collection[str], parts: int, room: int) -> Mapping[str, Share | str]:
    shares: dict[str, Share | str] = {}
    even = room // len(needs)
    for name in sorted(needs, key=lambda one: one not in pinned):  # pinned ones first: they leave the rest
        one = needs[name]
        if _least(one) > room:
            shares[name] = _does_not_fit(one, room, "beside the pinned ones and the processes of all")
            continue
        part = even if name in pinned else room // parts
        budget = part if _least(one) <= part else _least(one) if name in pinned else room  # it runs alone then
        tokens = min(one.most_tokens, (budget - one.fixed_bytes) // max(1, one.token_bytes))
        shares[name] = share = _share(one, tokens)
        room -= share.awake_bytes if name in pinned else 0
    return shares


def _even_tokens(needs: Mapping[str, Needs], num_bytes: int) -> dict[str, int]:
    """The same number of tokens for all, but the least for those that need more, and the most for those of less use."""
    low, high = 0, max((one.most_tokens for one in needs.values()), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        taken = sum(_clamped(one, middle) * one.token_bytes for one in needs.values())
        low, high = (middle, high) if taken <= num_bytes else (low, middle - 1)
    return {name: _clamped(one, low) for name, one in needs.items()}


def _clamped(one: Needs, tokens: int) -> int:
    return max(one.least_tokens, min(one.most_tokens, tokens))


def _least(one: Needs) -> int:
    """Bytes without which it cannot run."""
    return one.fixed_bytes + one.least_tokens * one.token_bytes


def _share(one: Needs, tokens: int) -> Share:
    return Share(tokens, one.process_bytes, one.fixed_bytes + tokens * one.token_bytes)


def _does_not_fit(one: Needs, room: int, where: str) -> str:
    return (
        f"it needs {format_bytes(_least(one))} of {one.device} (weights, and the KV cache of one request of "
        f"{one.least_tokens:,} tokens), and {format_bytes(max(0, room))} are left {where}. Lower its "
        "runtime.max_model_len, or serve fewer models"
    )
