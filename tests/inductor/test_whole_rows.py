"""whole_rows: which of Inductor's kernels keep their rows in registers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
from torch._inductor.choices import InductorChoices
from torch._inductor.ir import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from mllm_compile.inductor.patches.whole_rows import keep_whole_rows


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    before = InductorChoices.should_use_persistent_reduction
    # Replaced by itself, so that what the patch puts there goes at the end.
    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(before))
    keep_whole_rows()


def keeps(kinds: set[str], features: int, hint: ReductionHint = ReductionHint.INNER, cooperative: bool = False) -> bool:
    """True if a kernel of these reductions over rows of so many features keeps them."""
    nodes = [SimpleNamespace(node=SimpleNamespace(get_reduction_type=lambda kind=kind: kind)) for kind in kinds]
    kernel: Any = SimpleNamespace(
        reduction_nodes=lambda: nodes,
        get_reduction_hint=lambda: hint,
        reduction_numel=sympy.Integer(features),
        numel=sympy.Integer(64),
    )
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):  # type: ignore[arg-type]
        return bool(InductorChoices.should_use_persistent_reduction(kernel, cooperative))


@pytest.mark.parametrize(
    ("kinds", "most"),
    [
        ({"sum"}, 1024),
        ({"argmax"}, 1024),
        ({"max"}, 8192),
        ({"sum", "max"}, 8192),
        ({"welford_reduce"}, 2048),
        ({"welford_reduce", "max"}, 2048),
    ],
)
def test_rows_are_kept_up_to_a_width(kinds, most):
    assert keeps(kinds, most)
    assert not keeps(kinds, most + 1)


def test_of_other_kernels_inductor_decides():
    assert not keeps({"max"}, 4096, cooperative=True)
    assert not keeps({"max"}, 4096, ReductionHint.OUTER)
