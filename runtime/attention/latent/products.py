"""The two ways of a layer's up-projection, in torch: latents become keys and values, or queries and outputs absorb it.

Shape legend: T tokens, K keys, H query heads, n and r the columns of a head's keys that are made of a latent and that
are rotated, v those of its values, C the rank of a latent.
"""

from __future__ import annotations

import torch

from mllm_compile.runtime.attention.layer import AttentionLayer


def absorb(q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
    """Writes `out` [T, H, C + r] of q [T, H, n + r]: queries whose products with latents are those of q with keys."""
    n, rank = layer.up_key_dim, layer.v_head_dim
    torch.bmm(q[..., :n].transpose(0, 1), _of_heads(layer)[:, :n], out=out[..., :rank].transpose(0, 1))
    out[..., rank:].copy_(q[..., n:])


def apply_to_sums(latent: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
    """Writes `out` [T, H, v]: `latent` [T, H, C] are sums of latents, which become sums of values."""
    for_values = _of_heads(layer)[:, layer.up_key_dim :].transpose(1, 2)
    torch.bmm(latent.transpose(0, 1), for_values, out=out.transpose(0, 1))


def expand(latents: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
    """Writes `out` [K, H, n + v]: the keys without their rotated part, and the values, of latents [K, C + r]."""
    torch.mm(latents[:, : layer.v_head_dim], _up(layer).t(), out=out.flatten(1))


def _of_heads(layer: AttentionLayer) -> torch.Tensor:
    """[H, n + v, C]"""
    return _up(layer).unflatten(0, (layer.num_heads, -1))


def _up(layer: AttentionLayer) -> torch.Tensor:
    if layer.up_weight is None:
        raise RuntimeError(f"attention layer {layer.name} has no up-projection of its own")
    return layer.up_weight
