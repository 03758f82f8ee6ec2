"""A number for a GPU, which ranks tell each other to know whose memory they can open."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import torch


def gpu_number(index: int) -> int:
    """A number that processes have in common for one GPU, however each counts those that it sees.

    They have it where they share a kernel and its numbers of processes: containers of one host may not open each
    other's memory.

    Args:
        index: of this process's GPUs.
    """
    kernel = os.uname().nodename.encode()
    with suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    processes = ""
    with suppress(OSError):
        processes = os.readlink("/proc/self/ns/pid")
    words = kernel + processes.encode() + str(torch.cuda.get_device_properties(index).uuid).encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:7], "big")
