"""Layer norms whose rows are kept in registers, of up to twice as many features as Inductor keeps of any reduction."""

from __future__ import annotations

from typing import Any

_MOST_FEATURES = 2048


def keep_rows_of_layer_norms() -> None:
    """Lets Triton's kernel of a layer norm read its row once and take mean and variance of what it has.

    Above 1024 features Inductor goes through a row twice and, as it does not know the mean ahead, takes both by
    Welford's sums, whose divisions take longer than the memory.
    """
    from torch._inductor.choices import InductorChoices

    plain = InductorChoices.should_use_persistent_reduction
    if getattr(plain, "keeps_rows", False):
        return

    def should_use(features: Any, cooperative_reduction: bool) -> bool:
        return plain(features, cooperative_reduction) or (not cooperative_reduction and _is_short_norm(features))

    should_use.keeps_rows = True  # type: ignore[attr-defined]
    InductorChoices.should_use_persistent_reduction = staticmethod(should_use)  # type: ignore[assignment,method-assign]


def _is_short_norm(features: Any) -> bool:
    """True for mean and variance of rows of few features, one after another in memory."""
    from torch._inductor import config
    from torch._inductor.ir import ReductionHint
    from torch._inductor.virtualized import V

    kinds = {str(node.node.get_reduction_type()) for node in features.reduction_nodes()}
    return (
        config.triton.persistent_reductions
        and "welford_reduce" in kinds
        and features.get_reduction_hint() is ReductionHint.INNER
        and V.graph.sizevars.statically_known_leq(features.reduction_numel, _MOST_FEATURES)
    )
