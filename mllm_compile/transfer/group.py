"""A group that a trainer and this engine join, beside any default group of torch's.

The trainer hosts a TCPStore. Ranks meet under a prefix of its keys; then, as PyNccl's groups do, they sum one float32,
so that a member that is not there is noticed at once. SGLang's groups have the keys of torch's own named groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from mllm_compile.errors import TransferError
from mllm_compile.transfer.hosts import is_local

_MOST_WORLD = 1 << 14


class DistributedGroup:
    """A group that was joined; used by one thread at a time."""

    def __init__(self, group: Any, silence_s: float) -> None:
        self._group = group
        self._silence_s = silence_s

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        silence_s: float,
        allowed_hosts: Collection[str] = (),
        name: str | None = None,
    ) -> Self:
        """Joins; returns once all members have.

        Args:
            timeout_s: for all members to come.
            silence_s: a broadcast that takes so long has failed.
            allowed_hosts: beside this machine's own addresses.
            name: of a group with the keys of torch's named groups, as SGLang makes them; it sums nothing at first.

        Raises:
            TransferError: the host is not allowed, the numbers are wrong, or not all members come.
        """
        if not is_local(host) and host not in allowed_hosts:
            raise TransferError(f"the host {host[:100]!r} is not allowed to give weights; allow it by --rl-host")
        if not (2 <= world_size <= _MOST_WORLD and 0 < rank < world_size and 0 < port < 1 << 16):
            raise TransferError(
                f"rank {rank} of {world_size} at port {port}: expected a rank from 1 on below the size, and a port"
            )
        wait = timedelta(seconds=timeout_s)
        try:
            store = TCPStore(host, port, world_size, is_master=False, timeout=wait)
            prefixed = PrefixStore("weights", store) if name is None else _named_store(store, name)
            group = cls(ProcessGroupGloo(prefixed, rank, world_size, wait), silence_s)
            if name is None:
                group._group.allreduce([torch.zeros(1)]).wait(wait)
        except (RuntimeError, dist.DistError, OSError) as error:
            raise TransferError(
                f"not all of {world_size} members have joined at {host}:{port} within {timeout_s:g} s ({_first(error)})"
            ) from None
        return group

    def broadcast_into(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Receives what member `src` broadcasts, in the tensor's memory, which is contiguous.

        Raises:
            TransferError: the sender is gone, or silent.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        options.timeout = timedelta(seconds=self._silence_s)
        try:
            self._group.broadcast([tensor], options).wait(timedelta(seconds=self._silence_s))
        except RuntimeError as error:
            raise TransferError(f"the sender is gone, or silent for {self._silence_s:g} s ({_first(error)})") from None

    def close(self) -> None:
        """Leaves the group."""
        self._group = None


def _named_store(store: Any, name: str) -> Any:
    """The store as torch 2.13's named groups see it: a prefix of the name, of the backend's device, and of the name."""
    return PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))


def packed(
    group: DistributedGroup,
    names: Sequence[str],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
    buffer_bytes: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors from buffers of bytes without padding; a buffer ends with the tensor that takes it beyond `buffer_bytes`.

    vLLM's rule (packed_tensor.py). A tensor is a view of its buffer where it is aligned, and is read before the next.
    """
    rows = list(zip(names, dtypes, shapes, strict=True))
    while rows:
        count = total = 0
        while count < len(rows) and total <= buffer_bytes:
            total += _bytes_of(*rows[count][1:])
            count += 1
        buffer = torch.empty(total, dtype=torch.uint8)
        group.broadcast_into(buffer)
        begin = 0
        for name, dtype, shape in rows[:count]:
            end = begin + _bytes_of(dtype, shape)
            part = buffer[begin:end]
            yield name, (part.clone() if begin % dtype.itemsize else part).view(dtype).view(tuple(shape))
            begin = end
        rows = rows[count:]


def _bytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return prod(shape) * dtype.itemsize


def _first(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
