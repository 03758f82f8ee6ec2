"""A group that a trainer and this engine join, beside any default group of torch's: over gloo or NCCL.

The trainer hosts a TCPStore. Ranks meet under its keys: vLLM's, or those of torch's own named groups, as SGLang has
them. Then, as PyNccl's groups do, they sum one float32, so that a member that is not there is noticed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mllm_compile.errors import DeviceMemoryError, TransferError
from mllm_compile.transfer.gloo_group import GlooGroup
from mllm_compile.transfer.gloo_process import Joining, first_line, named_store
from mllm_compile.transfer.hosts import is_local
from mllm_compile.transfer.nccl_group import NcclGroup, id_in

_MOST_WORLD = 1 << 14
_GLOO, _NCCL = "gloo", "nccl"
BACKENDS = (_GLOO, _NCCL)
_VLLMS_KEY = "broadcast_from/0/0"  # of a pickle of the group's id
_TORCHS_KEY = "0"  # of the id itself, of torch's first communicator of a group


class Group(Protocol):
    """A group that was joined; used by one thread at a time.

    Attributes:
        device: of the tensors that it fills.
    """

    device: torch.device

    def begin(self, tensor: torch.Tensor, src: int = 0) -> Callable[[], None]:
        """Begins to receive what member `src` broadcasts, in the tensor's memory, which is contiguous; the result waits
        for it.

        Raises:
            TransferError: the sender is gone, or silent.
        """

    def close(self) -> None:
        """Leaves the group."""


def join(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    *,
    device: torch.device,
    timeout_s: float,
    silence_s: float,
    allowed_hosts: Collection[str] = (),
    name: str | None = None,
    backend: str | None = None,
) -> Group:
    """Joins; returns once all members have, of a named group over NCCL once its store answers.

    Args:
        device: the engine's.
        timeout_s: for all members to come.
        silence_s: a broadcast that takes so long has failed.
        allowed_hosts: beside this machine's own addresses.
        name: of a group with the keys of torch's named groups, as SGLang makes them; it sums nothing at first.
        backend: gloo or nccl; None: what the device takes.

    Raises:
        TransferError: the host is not allowed, the numbers are wrong, or not all members come.
    """
    if not is_local(host) and host not in allowed_hosts:
        raise TransferError(f"the host {host[:100]!r} is not allowed to give weights; allow it by --rl-host")
    if not (2 <= world_size <= _MOST_WORLD and 0 < rank < world_size and 0 < port < 1 << 16):
        raise TransferError(
            f"rank {rank} of {world_size} at port {port}: expected a rank from 1 on below the size, and a port"
        )
    backend = backend or (_NCCL if device.type == "cuda" else _GLOO)
    if backend == _GLOO:
        return GlooGroup(Joining(host, port, rank, world_size, timeout_s, silence_s, name))
    try:
        store = TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s))
        return _over_nccl(store, name, rank, world_size, device, timeout_s, silence_s)
    except (RuntimeError, dist.DistError, OSError) as error:
        raise TransferError(
            f"not all of {world_size} members have joined at {host}:{port} within {timeout_s:g} s ({first_line(error)})"
        ) from None


def broadcast_into(group: Group, tensor: torch.Tensor) -> None:
    """Receives what the trainer broadcasts, and waits for it; see Group.begin."""
    group.begin(tensor)()


def empty(group: Group, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for what a group brings.

    Raises:
        DeviceMemoryError: there is not so much.
    """
    try:
        return torch.empty(tuple(shape), dtype=dtype, device=group.device)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        raise DeviceMemoryError(
            f"there is no room for a buffer of {prod(shape) * dtype.itemsize:,} bytes that the trainer announces. Send "
            "smaller ones (packed_buffer_size_bytes), or leave more memory free."
        ) from error


def _over_nccl(
    store: Any, name: str | None, rank: int, world_size: int, device: torch.device, timeout_s: float, silence_s: float
) -> NcclGroup:
    if name is not None:  # torch makes its communicator with the first collective
        named = named_store(store, name, "cuda")
        return NcclGroup(lambda: bytes(named.get(_TORCHS_KEY)), rank, world_size, device, timeout_s, silence_s)
    group = NcclGroup(lambda: id_in(store.get(_VLLMS_KEY)), rank, world_size, device, timeout_s, silence_s)
    group.add_one()
    return group


def packed(
    group: Group,
    names: Sequence[str],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
    buffer_bytes: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors from buffers of bytes without padding; a buffer ends with the tensor that takes it beyond `buffer_bytes`.

    vLLM's rule (packed_tensor.py). A tensor is a view of its buffer where it is aligned. The next buffer is on its way
    while one is read.
    """
    rows = list(zip(names, dtypes, shapes, strict=True))
    coming = _begun(group, rows, buffer_bytes)
    while coming is not None:
        some, buffer, wait = coming
        wait()
        rows = rows[len(some) :]
        coming = _begun(group, rows, buffer_bytes)
        begin = 0
        for name, dtype, shape in some:
            end = begin + _bytes_of(dtype, shape)
            part = buffer[begin:end]
            yield name, (part.clone() if begin % dtype.itemsize else part).view(dtype).view(tuple(shape))
            begin = end


_Row = tuple[str, torch.dtype, Sequence[int]]


def _begun(
    group: Group, rows: Sequence[_Row], buffer_bytes: int
) -> tuple[Sequence[_Row], torch.Tensor, Callable[[], None]] | None:
    """The tensors of the next buffer, itself, and a call that waits for it; None behind the last."""
    count = total = 0
    while count < len(rows) and total <= buffer_bytes:
        total += _bytes_of(*rows[count][1:])
        count += 1
    if not count:
        return None
    buffer = empty(group, (total,), torch.uint8)
    return rows[:count], buffer, group.begin(buffer)


def _bytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return prod(shape) * dtype.itemsize
