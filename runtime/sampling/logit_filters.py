"""top_k, top_p and min_p as masks on scores, so that a row without filters keeps its very scores in any batch.

The order is Transformers': top_k, then top_p over what top_k left, then min_p. Each keeps every token that ties with
the last one kept. On CUDA with FlashInfer its radix kernels find the tokens; elsewhere one sort a row does.

Shape legend: S rows, W scores a row.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch


@cache
def _flashinfer_sampling() -> ModuleType | None:
    """FlashInfer's sampling kernels; imported on first use, as it needs CUDA and takes seconds."""
    try:
        from flashinfer import sampling
    except ImportError:
        return None
    kernels: ModuleType = sampling
    return kernels


def filter_scores(
    scores: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    log_min_ps: torch.Tensor | None,
) -> torch.Tensor:
    """Scores with -inf for what the filters leave out. No sync; a filter that is None costs nothing.

    Args:
        scores: [S, W] float32, contiguous: logits / temperature, without NaN and inf. May be overwritten.
        top_ks: [S] int64, 0: off for the row; None: off for all.
        top_ps: [S] float32 in (0, 1], 1: off for the row; None: off for all.
        log_min_ps: [S] float32, log(min_p), -inf: off for the row; None: off for all.

    Returns:
        [S, W] float32, contiguous.
    """
    if top_ks is not None or top_ps is not None:
        kernels = _flashinfer_sampling() if scores.is_cuda else None
        if kernels is None:
            scores.masked_fill_(scores < _sorted_thresholds(scores, top_ks, top_ps), -torch.inf)
        else:
            scores = _mask_with_flashinfer(kernels, scores, top_ks, top_ps)
    if log_min_ps is not None:
        scores.masked_fill_(scores < scores.amax(dim=-1, keepdim=True) + log_min_ps[:, None], -torch.inf)
    return scores


def _sorted_thresholds(scores: torch.Tensor, top_ks: torch.Tensor | None, top_ps: torch.Tensor | None) -> torch.Tensor:
    """[S, 1] float32: the lowest score that top_k and top_p keep in each row."""
    ordered = scores.sort(dim=-1, descending=True).values
    if top_ks is None:
        threshold = ordered[:, -1:]
    else:
        width = scores.shape[1]
        threshold = ordered.gather(1, (torch.where(top_ks > 0, top_ks, width).clamp(max=width) - 1)[:, None])
    if top_ps is None:
        return threshold
    probs = ordered.masked_fill_(ordered < threshold, -torch.inf).softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1).sub_(probs)
    num_kept = (mass_before < top_ps[:, None]).sum(dim=-1, keepdim=True).clamp_(min=1)
    # The sum of a whole row may round to 1 before its end, so "off" is decided by the parameter.
    return torch.where(top_ps[:, None] < 1, ordered.gather(1, num_kept - 1), threshold)


def _mask_with_flashinfer(
    kernels: ModuleType, scores: torch.Tensor, top_ks: torch.Tensor | None, top_ps: torch.Tensor | None
) -> torch.Tensor:
    """The same masks from FlashInfer's kernels (0.6.18), which take a k and a p for each row."""
    if top_ks is not None:
        width = scores.shape[1]
        scores = kernels.top_k_mask_logits(scores, torch.where(top_ks > 0, top_ks, width).clamp(max=width).int())
    if top_ps is not None:
        probs = scores.softmax(dim=-1)
        top_ps = top_ps.contiguous()  # the kernel reads a column of a table as if it were dense
        # Sums in integers: with float atomics, whether a token is kept could change from run to run.
        kept = kernels.top_p_renorm_probs(probs, top_ps, is_deterministic=True)
        scores.masked_fill_((kept == 0) & (top_ps < 1)[:, None], -torch.inf)
    return scores
