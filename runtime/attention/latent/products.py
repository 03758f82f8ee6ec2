"""The two ways of a layer's up-projection, in torch: latents become keys and values, or queries and outputs absorb it.

Shape legend: T tokens, K keys, H query heads, n and r the columns of a head's keys from a latent and rotated, v of its
values, C the rank of a latent.
"""

from __future__ import annotations

import torch

from mllm_compile.runtime.attention.layer import AttentionLayer


def absorb(q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
    """Writes `out` [T, H, C + r] from q [T, H, n + r]: queries whose products with latents equal q's with keys."""
    n, rank = layer.up_key_dim, layer.v_head_dim
    torch.bmm(q[..., :n].transpose(0, 1), layer.up_of_heads[0], out=out[..., :rank].transpose(0, 1))
    out[..., rank:].copy_(q[..., n:])


def apply_to_sums(latent: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
    """Writes `out` [T, H, v]: `latent` [T, H, C] are sums of latents, which become sums of values."""
    torch.bmm(latent.transpose(0, 1), layer.up_of_heads[1], out=out.transpose(0, 1))


def expand(latents: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
    """Writes `out` [K, H, n + v]: the keys without their rotated part, and the values, of latents [K, C + r].

    Raises:
        RuntimeError: the layer has no up-projection.
    """
    if layer.up_weight is None:
        raise RuntimeError(f"attention layer {layer.name} has no up-projection of its own")
    torch.mm(latents[:, : layer.v_head_dim], layer.up_weight.t(), out=out.flatten(1))
