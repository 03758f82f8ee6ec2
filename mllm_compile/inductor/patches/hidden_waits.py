"""Triton kernels of ours with waits in them, as torch analyses them: without the waits.

Up to torch 2.13 the analysis of what a kernel writes gives up at the inline assembly that a wait is.
"""

from __future__ import annotations

from typing import Any


def hide_waits_from_analysis() -> None:
    """Lets torch see which arguments a kernel with waits writes: it analyses the kernel as it is without them.

    Up to torch 2.13 the analysis gives up at a wait's inline assembly, and assumes that every argument is written.
    Pieces would then copy their weights and the KV cache. Ours have a constant EARLY that decides whether they wait.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    old, new = "identify_accessed_tensors", "identify_mutated_tensors"  # up to torch 2.11, and since
    name = old if hasattr(triton_kernel_wrap, old) else new
    plain = getattr(triton_kernel_wrap, name)
    if getattr(plain, "hides_waits", False):
        return

    def identify(kernel: Any, kwargs: dict[str, Any], *rest: Any) -> Any:
        return plain(kernel, kwargs | {"EARLY": False} if "EARLY" in kwargs else kwargs, *rest)

    identify.hides_waits = True  # type: ignore[attr-defined]
    setattr(triton_kernel_wrap, name, identify)
