"""The pool of features: images used longest ago go first, a step's images never."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mllm_compile.runtime.media.feature_pool import FeaturePool
from mllm_compile.runtime.media.tower import MAX_FEATURES


def pool(capacity: int = 10) -> FeaturePool:
    return FeaturePool(capacity, 4, torch.float32, torch.device("cpu"))


def test_rows_belong_to_one_image_and_none_gets_the_row_of_zeros() -> None:
    own = pool()
    rows = [own.place(name, count, ()) for name, count in (("a", 4), ("b", 6))]
    assert sorted(np.concatenate(rows).tolist()) == list(range(1, 11))
    assert (own.num_free, own.rows.shape) == (0, (11, 4))
    found = own.find("a")
    assert found is not None and np.array_equal(found, rows[0])
    own.forget("a")
    assert (own.num_free, own.find("a")) == (4, None)


def test_the_image_used_longest_ago_goes_unless_the_step_needs_it() -> None:
    own = pool()
    for name in "abc":
        own.place(name, 3, ())
    own.find("a")
    own.place("d", 4, {"d"})
    assert [name for name in "abcd" if own.find(name) is not None] == ["a", "c", "d"]
    own.place("e", 3, {"a", "e"})
    assert [name for name in "acde" if own.find(name) is not None] == ["a", "d", "e"]


def test_a_step_that_needs_more_than_there_is_is_an_error_of_ours() -> None:
    own = pool()
    own.place("a", 6, ())
    with pytest.raises(RuntimeError, match="an image of 5 features finds 4 free rows beside the 2 images"):
        own.place("b", 5, {"a", "b"})


def test_the_largest_image_and_two_steps_fit() -> None:
    assert FeaturePool.capacity_for(8192, 4096) == 2 * 8192 == MAX_FEATURES
    assert FeaturePool.capacity_for(512, 4096) == 4096
    assert FeaturePool.capacity_for(512, 1 << 20) == MAX_FEATURES
