"""Histograms and rates."""

import numpy as np
import pytest

from mllm_compile.engine.stats import Histogram, RateMeter


def test_a_histogram_counts_each_observation_once():
    histogram = Histogram(1e-3, 1.0)
    histogram.observe(np.array([1e-9, 1e-3, 0.01, 0.01, 5.0]))
    snapshot = histogram.snapshot()
    assert (snapshot.count, snapshot.counts[0], snapshot.counts[-1]) == (5, 2, 1)
    assert snapshot.total == pytest.approx(5.021, abs=1e-6)
    assert snapshot.mean == pytest.approx(snapshot.total / 5)
    assert (snapshot.largest, Histogram(1e-3, 1.0).snapshot().largest) == (5.0, 0.0)


def test_quantiles_are_right_within_a_bucket():
    histogram = Histogram(1e-3, 10.0)
    values = np.random.default_rng(0).lognormal(-3, 1, 10_000)
    histogram.observe(values)
    for q in (0.05, 0.5, 0.99):
        assert histogram.snapshot().quantile(q) == pytest.approx(np.quantile(values, q), rel=0.3)


def test_no_quantile_is_beyond_the_largest():
    histogram = Histogram(1e-3, 10.0)
    histogram.observe(np.array([0.0101, 0.0101]))
    assert histogram.snapshot().quantile(0.99) <= 0.0101


def test_without_observations_there_is_no_quantile():
    snapshot = Histogram(1e-3, 10.0).snapshot()
    assert (snapshot.quantile(0.5), snapshot.mean) == (None, None)


def test_a_rate_is_over_the_last_ten_seconds():
    meter = RateMeter(0.0)
    for step in range(1, 2001):
        meter.add(3, step * 0.01)
    assert meter.rate(20.0) == pytest.approx(300, rel=0.05)
    assert meter.rate(25.0) == pytest.approx(150, rel=0.1)
    assert meter.rate(60.0) == 0.0
    meter.add(50, 60.0)
    assert meter.rate(61.0) == pytest.approx(5)


def test_a_rate_is_known_from_the_first_second():
    meter = RateMeter(0.0)
    meter.add(10, 0.5)
    assert meter.rate(1.0) == pytest.approx(10)
