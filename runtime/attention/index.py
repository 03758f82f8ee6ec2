"""The choice of keys by an indexer (DeepSeek's sparse attention, DSA), in plain torch.

Each token sees the `top_k` keys of the largest scores alone, among those that it could see. A score is the sum over
the indexer's heads of weight · relu(q · k), in float32. The indexer's keys are the last `index_dim` columns of a
layer's cached keys, alike in all heads.

Shape legend: T tokens, H the indexer's heads, D their width, L keys.
"""

from __future__ import annotations

import torch

Index = tuple[torch.Tensor, torch.Tensor]  # queries [T, H, D], and weights of heads [T, H], float32


def chosen_keys(index: Index, keys: torch.Tensor, visible: torch.Tensor, top_k: int) -> torch.Tensor:
    """The keys of each token, bool [T, L]: those of `visible` [T, L] with the largest scores.

    Args:
        keys: the indexer's, [L, D], or [T, L, D] where each token has its own.
    """
    if keys.shape[-2] <= top_k:
        return visible
    queries, weights = index
    keys, scores = keys.float(), torch.zeros(visible.shape, dtype=torch.float32, device=visible.device)
    for head in range(queries.shape[1]):  # one after another: scores of all heads would take as many times the memory
        products = (keys @ queries[:, head, :, None].float())[..., 0] if keys.dim() == 3 else None
        products = queries[:, head].float() @ keys.T if products is None else products
        scores += weights[:, head, None] * products.relu()
    best = scores.masked_fill(~visible, float("-inf")).topk(top_k, dim=-1).indices
    return torch.zeros_like(visible).scatter_(-1, best, True) & visible
