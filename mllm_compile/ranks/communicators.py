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


def new_meeting(device: str, descriptor: int) -> Meeting:
    """Where the ranks of a new group meet.

    Args:
        descriptor: of an empty file without a name, which all ranks have open under this number.
    """
    if device == "cpu":
        return Meeting(path=f"/proc/self/fd/{descriptor}")
    return Meeting(nccl_id=new_group_id().hex())


def meet(meeting: Meeting, rank: int, size: int, device: torch.device) -> Communicator:
    """Waits for all ranks.

    Raises:
        DeviceError, RuntimeError: another one ended meanwhile, or there is no way to it.
    """
    if meeting.path is not None:
        return GlooCommunicator(rank, size, Path(meeting.path))
    return NcclCommunicator(rank, size, bytes.fromhex(meeting.nccl_id or ""), device)
