"""Rows that stay in registers where Inductor would read them several times: wider ones than it keeps of any kernel."""

from __future__ import annotations

from typing import Any

_MOST_FEATURES, _MOST_SCALED = 2048, 8192  # of a layer norm; of a row that gets a scale


def keep_whole_rows() -> None:
    """Lets Triton's kernel of a layer norm, or of a scale for a row, read its row once.

    Above 1024 features Inductor reads a row once for each reduction, and again for each use. For a norm and the scale
    of its output that is three times. As it does not know a layer norm's mean ahead, it takes mean and variance by
    Welford's sums, whose divisions take longer than the memory.
    """
    from torch._inductor.choices import InductorChoices

    plain = InductorChoices.should_use_persistent_reduction
    if getattr(plain, "keeps_rows", False):
        return

    def should_use(features: Any, cooperative_reduction: bool) -> bool:
        return plain(features, cooperative_reduction) or (not cooperative_reduction and _is_short(features))

    should_use.keeps_rows = True  # type: ignore[attr-defined]
    InductorChoices.should_use_persistent_reduction = staticmethod(should_use)  # type: ignore[method-assign]


def _is_short(features: Any) -> bool:
    """True for mean and variance of rows of few features, one after another in memory, and for the largest of a row."""
    from torch._inductor import config
    from torch._inductor.ir import ReductionHint
    from torch._inductor.virtualized import V

    kinds = {str(node.node.get_reduction_type()) for node in features.reduction_nodes()}
    most = _MOST_FEATURES if "welford_reduce" in kinds else _MOST_SCALED if "max" in kinds else 0
    return (
        config.triton.persistent_reductions
        and features.get_reduction_hint() is ReductionHint.INNER
        and V.graph.sizevars.statically_known_leq(features.reduction_numel, most)
    )
