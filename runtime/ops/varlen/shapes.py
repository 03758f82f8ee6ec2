"""The attentions within segments that the kernels take; free of torch, so that passes can ask anywhere."""

from __future__ import annotations

_PANEL = 64  # columns of a head in a panel of 128 bytes
_REST = 32  # at most, in a panel of 64 bytes


def is_taken(head_dim: int, sm_scale: float) -> bool:
    """True for heads of 64, 72, 80, 88, 96 and 128."""
    panels, rest = divmod(head_dim, _PANEL)
    return sm_scale > 0 and head_dim % 8 == 0 and 1 <= panels <= 2 and rest <= (_REST if panels == 1 else 0)
