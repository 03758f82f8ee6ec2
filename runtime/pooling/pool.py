"""Pools hidden states of packed texts, on the device.

Shape legend: T tokens, S texts, W width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from mllm_compile.runtime.pooling.facts import Activation, PoolingRule


def pool(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    rules: Sequence[PoolingRule],
    skipped: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [S, len(rules) * W] of texts, in the type of `hidden`; means and maxima are made in float32.

    Args:
        hidden: [T, W].
        starts, ends: [S] int64, where texts begin and end, one after another.
        rules: none of them `token`.
        skipped: [S] int64: a text's first tokens that means and maxima leave out.
    """
    parts = [_pooled(hidden, starts, ends, rule, skipped) for rule in rules]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _pooled(
    hidden: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, rule: PoolingRule, skipped: torch.Tensor | None
) -> torch.Tensor:
    if rule == "cls":
        return hidden.index_select(0, starts)
    if rule == "last":
        return hidden.index_select(0, ends - 1)
    if skipped is not None:
        starts = starts + skipped
    if hidden.device.type == "cpu":  # where segment_reduce takes six times as long
        reduced = torch.cat([_reduced(texts.float(), rule) for texts in _by_length(hidden, starts, ends)])
    else:
        edges = torch.stack([starts, ends], 1).flatten()  # what is between texts is a segment of its own
        kind = "max" if rule == "max" else "sum"
        reduced = torch.segment_reduce(hidden.float(), kind, offsets=edges, unsafe=True)[::2]
    lengths = (ends - starts).float()[:, None]
    if rule == "mean":
        reduced = reduced / lengths
    elif rule == "mean_sqrt_len":
        reduced = reduced / lengths.sqrt()
    return reduced.to(hidden.dtype)


def _by_length(hidden: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows of texts, [n, length, W] of as many as are equally long and follow each other."""
    spans = list(zip(starts.tolist(), ends.tolist(), strict=True))
    first = 0
    for place in range(1, len(spans) + 1):
        start, end = spans[first]
        length = end - start
        if place == len(spans) or spans[place] != (spans[place - 1][1], spans[place - 1][1] + length):
            yield hidden[start : spans[place - 1][1]].unflatten(0, (place - first, length))
            first = place


def _reduced(texts: torch.Tensor, rule: PoolingRule) -> torch.Tensor:
    return texts.amax(1) if rule == "max" else texts.sum(1)


def activated(scores: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Probabilities [.., labels] float32 of a classifier's scores."""
    scores = scores.float()
    if activation == "sigmoid":
        return scores.sigmoid()
    return scores.softmax(-1) if activation == "softmax" else scores


def finished(embeddings: torch.Tensor, dimensions: int | None, normalize: bool) -> torch.Tensor:
    """Embeddings [.., D] float32, cut to the first numbers, of length 1 where that is asked for."""
    embeddings = embeddings.float()
    if dimensions is not None:
        embeddings = embeddings[..., :dimensions]
    return F.normalize(embeddings, dim=-1) if normalize else embeddings
