"""Programmatic dependent launch (Hopper and later): a kernel is on its SMs before the one that it reads from has ended.

A kernel that is launched so may fetch what no kernel writes (weights), and must wait before it touches what another
kernel touches: it may not count on the one ahead having waited, as some let their dependents start before they have
(ops/stream_linear/lanes.cu). A kernel that never calls start_dependents lets them start when it ends. The launcher's
half is mllm_compile/inductor/patches/early_launch.py. Imports Triton: only the kernels do this.

The two instructions are PTX's griddepcontrol (PTX ISA, "Parallel Synchronization and Communication Instructions").
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def starts_early() -> bool:
    """True if kernels compiled for this machine's GPU start early. Asking initialises CUDA, which importing this must
    not, as forking processes import it."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


@triton.jit
def start_dependents() -> None:
    """Lets the next kernel take the room that this one leaves on the SMs."""
    gdc_launch_dependents()


@triton.jit
def wait_for_prerequisites() -> None:
    """Returns when the kernel before this one has ended, and so all that it has waited for, and what they wrote is
    visible. A block of every launch does this, also one that finds no work: else the next kernel waits for nothing
    before that."""
    gdc_wait()
