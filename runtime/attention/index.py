"""The choice of keys by an indexer (sparse attention), in plain torch.

Each token sees the keys alone that its indexer chooses, among those that it could see. Of *single keys* (DeepSeek's,
DSA) it takes the `top_k` of the largest scores: the sum over the indexer's heads of weight · relu(q · k). Of *blocks*
(MiniMax-M3's) each of the indexer's heads takes as many, for as many of attention's heads: a block counts as its best
key, q · k, and the last `local` ones are always taken. Scores are in float32. The indexer's keys are the last
`index_dim` columns of a layer's cached keys, alike in all heads.

Shape legend: T tokens, H the indexer's heads, D their width, L keys, N blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mllm_compile.runtime.attention.layer import KeyChoice

Index = tuple[torch.Tensor, ...]  # queries [T, H, D], and of single keys weights of heads [T, H], float32


def chosen_keys(index: Index, keys: torch.Tensor, visible: torch.Tensor, choice: KeyChoice) -> torch.Tensor:
    """The keys of each token, bool [T, H, L], of single keys [T, 1, L].

    Args:
        keys: the indexer's, [L, D], or [T, L, D] where each token has its own; the first has position 0.
        visible: [T, L] bool, the keys to choose from; the last one is of the token's own position.
    """
    of_heads = visible[:, None]
    if keys.shape[-2] <= choice.full_length:
        return of_heads
    keys = keys.float()
    if choice.block:
        return _of_blocks(index[0], keys, visible, choice) & of_heads
    queries, weights = index
    scores = torch.zeros(visible.shape, dtype=torch.float32, device=visible.device)
    for head in range(queries.shape[1]):  # one after another: scores of all heads would take as many times the memory
        scores += weights[:, head, None] * _products(queries[:, head], keys).relu()
    best = scores.masked_fill(~visible, float("-inf")).topk(choice.top_k, dim=-1).indices
    return (torch.zeros_like(visible).scatter_(-1, best, True) & visible)[:, None]


def _of_blocks(queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, choice: KeyChoice) -> torch.Tensor:
    """The keys of the blocks that each head chooses, [T, H, L]; later ones than a token sees may be among them."""
    num_keys, size = visible.shape[1], choice.block
    filling = -num_keys % size
    own = (visible * torch.arange(num_keys, device=visible.device)).amax(-1, keepdim=True) // size
    local = (own - torch.arange(choice.local, device=visible.device)).clamp(min=0)
    of_heads = []
    for head in range(queries.shape[1]):
        scores = _products(queries[:, head], keys).masked_fill(~visible, float("-inf"))
        of_blocks = F.pad(scores, (0, filling), value=float("-inf")).unflatten(-1, (-1, size)).amax(-1)  # [T, N]
        best = of_blocks.scatter_(-1, local, float("inf")).topk(choice.top_k, dim=-1).indices
        chosen = torch.zeros_like(of_blocks, dtype=torch.bool).scatter_(-1, best, True)
        of_heads.append(chosen.repeat_interleave(size, -1)[:, :num_keys])
    return torch.stack(of_heads, 1)


def _products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q · k of one head, [T, L]."""
    queries = queries.float()
    return (keys @ queries[..., None])[..., 0] if keys.dim() == 3 else queries @ keys.T
