"""A file in memory that the front holds for its engines: prefixes in it outlive an engine that ends or is killed.

It is empty until an engine takes room (runtime/tiers/kept.py), and goes with the front, however that ends.
"""

from __future__ import annotations

import os

from mllm_compile.runtime.tiers.names import KEPT_FILE, KEPT_VARIABLE


class KeptMemory:
    """The file, for one engine at a time."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(KEPT_FILE, os.MFD_CLOEXEC)

    @staticmethod
    def environment(descriptor: int) -> dict[str, str]:
        """The variable by which an engine finds the file that has this descriptor there."""
        return {KEPT_VARIABLE: str(descriptor)}

    @property
    def num_bytes(self) -> int:
        """The memory that it takes now."""
        return os.fstat(self.descriptor).st_blocks * 512

    def close(self) -> None:
        """Gives the memory back, when no engine has it any more."""
        os.close(self.descriptor)
