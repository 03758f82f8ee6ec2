"""Attention within each row of a batch, under a mask that data decide: towers of images that are partly filled use it.

torch's own call compares the mask's sizes with 1 and with the batch's, so torch 2.11 branches there on a number that a
trace leaves open. Behind an op the sizes are numbers.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("masked_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float sm_scale) -> Tensor")


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sm_scale: float
) -> torch.Tensor:
    """Attends by torch's kernels of the device; [B, N, H, Dv].

    Args:
        q: [B, H, N, D]; k: [B, H, M, D]; v: [B, H, M, Dv].
        mask: [B, 1 or H, N, M]: bool, true where a row sees a key, or of q's dtype, added to scores. None: it sees all.
        sm_scale: factor on q·k.
    """
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=sm_scale)
    return attended.transpose(1, 2).contiguous()


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sm_scale: float
) -> torch.Tensor:
    return v.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


_LIBRARY.impl("masked_attention", masked_attention, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::masked_attention", _fake, lib=_LIBRARY)
