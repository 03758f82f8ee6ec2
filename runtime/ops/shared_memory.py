"""How much shared memory a block may have: what the loads of a kernel that are under way must fit in."""

from __future__ import annotations

from functools import cache

import torch


@cache
def most_shared_bytes() -> int:
    """Bytes of this machine's GPU. Asking initialises CUDA."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # torch's stubs lack it
