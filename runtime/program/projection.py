"""Makes one hidden state of several layers' ones, as a drafter reads them: norms, then a product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from mllm_compile.runtime.program.spec import HiddenProjection


@dataclass(frozen=True)
class Projection:
    """A HiddenProjection over its weights.

    Attributes:
        weight: [hidden, n * hidden].
        norms: weights of RMS norms, one for all n hidden states together or one for each; none: they are not normed.
        norm_behind: of one behind the product.
        mask: [n * hidden], which stands for the hidden states of a mask.
    """

    weight: torch.Tensor
    norms: tuple[torch.Tensor, ...]
    eps: float
    norm_behind: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @classmethod
    def of(cls, facts: HiddenProjection, weights: Mapping[str, torch.Tensor]) -> Projection:
        norms, behind = tuple(weights[name] for name in facts.norms), facts.norm_behind
        mask = None if facts.mask is None else weights[facts.mask].flatten()
        return cls(weights[facts.weight], norms, facts.eps, None if behind is None else weights[behind], mask)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, n * hidden] → [T, hidden]."""
        if self.norms:
            parts = zip(hidden_states.chunk(len(self.norms), -1), self.norms, strict=True)
            normed = [functional.rms_norm(part, norm.shape, norm, self.eps) for part, norm in parts]
            hidden_states = torch.cat(normed, -1)
        projected = functional.linear(hidden_states, self.weight)
        if self.norm_behind is None:
            return projected
        return functional.rms_norm(projected, self.norm_behind.shape, self.norm_behind, self.eps)
