"""The host of a rank: GPUs of one host may see each other's memory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def host_number() -> int:
    """A number that processes have in common where they share a kernel and its numbers of processes: containers of one
    host may not open each other's memory."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        boot = file.read()
    namespace = os.readlink("/proc/self/ns/pid") if Path("/proc/self/ns/pid").is_symlink() else ""
    return int.from_bytes(hashlib.sha256(boot + namespace.encode()).digest()[:7], "big")
