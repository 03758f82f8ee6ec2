"""Limits of the cost of quantised weights for the embedded model, in KL divergence from float32
(docs/lab/quantised.md)."""

from __future__ import annotations

import pytest

from tests import quantised_numerics
from tests.quantised_numerics import SCHEMES, costs

TEXTS = 2
USUAL = ("fp8", "fp8 by fp8", "int4")  # what a plain checkpoint's linears become, and what they read


OTHERS = tuple(name for name in SCHEMES if name not in USUAL)


@pytest.mark.parametrize("names", [USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["usual", "others"])
def test_no_scheme_is_further_from_float32_than_it_may_be(names, monkeypatch):
    monkeypatch.setattr(quantised_numerics, "MOST_TEXTS", TEXTS)
    _, found = costs(list(names))
    assert set(found) == set(names)
    for name, cost in found.items():
        limit = SCHEMES[name][1]
        assert limit / 4 < cost.mean_kl <= limit, name
