"""The communicator of a rank's device: gloo on a CPU, NCCL on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from mllm_compile.ranks.start import Meeting
from mllm_compile.runtime.collectives.base import Communicator
from mllm_compile.runtime.collectives.gloo import GlooCommunicator
from mllm_compile.runtime.collectives.nccl import NcclCommunicator, new_group_id


def device_of_rank(first: str, rank: int) -> str:
    """The device of a rank: rank 0 has `first`, the others the GPUs behind it; cpu is all ranks'."""
    kind, _, index = first.partition(":")
    return first if kind == "cpu" else f"{kind}:{int(index or 0) + rank}"


def new_meeting(device: str) -> Meeting:
    """Where the ranks of a new group meet."""
    return Meeting() if device == "cpu" else Meeting(new_group_id().hex())


def meet(meeting: Meeting, rank: int, size: int, device: torch.device, place: int) -> Communicator:
    """Waits for all ranks.

    Args:
        place: the descriptor of an empty file without a name, which all ranks have open.

    Raises:
        DeviceError, RuntimeError: another one ended meanwhile, or there is no way to it.
    """
    if meeting.nccl_id is None:
        return GlooCommunicator(rank, size, Path(f"/proc/self/fd/{place}"))
    return NcclCommunicator(rank, size, bytes.fromhex(meeting.nccl_id), device)
