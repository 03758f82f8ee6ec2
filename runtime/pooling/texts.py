"""The texts of a step, and what each asks for; free of torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.pooling.facts import PoolingRule, PoolingTask


@dataclass(frozen=True)
class PoolingParams:
    """The answer that a text asks for.

    Attributes:
        task: one of PoolingFacts.tasks.
        rules: of an embedding.
        normalize: an embedding has a length of 1.
        dimensions: it is cut to its first numbers; None: it is not.
        activates: scores become probabilities.
    """

    task: PoolingTask
    rules: tuple[PoolingRule, ...]
    normalize: bool = False
    dimensions: int | None = None
    activates: bool = True

    @property
    def is_of_tokens(self) -> bool:
        """True if each token has an answer."""
        return self.task in ("token_embed", "token_classify")


@dataclass(frozen=True, eq=False)
class PackedText:
    """A text of a step.

    Attributes:
        ids: [n] int64, at least one.
        params: what it asks for.
        kinds: [n] int64, or None: all 0.
        skipped: its first tokens that means leave out.
    """

    ids: np.ndarray
    params: PoolingParams
    kinds: np.ndarray | None = None
    skipped: int = 0
