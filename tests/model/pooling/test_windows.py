"""How far attention of a model that pools sees, asked of masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.mask_probe import ObservedCall
from mllm_compile.model.pooling.windows import reach_of


def _call(sees: Any) -> ObservedCall:
    return ObservedCall(lambda batch, head, query, key: torch.as_tensor(sees(query - key)))


@pytest.mark.parametrize(
    ("sees", "reach"),
    [
        (lambda far: far == far, (-1, -1)),
        (lambda far: far >= 0, (-1, 0)),
        (lambda far: far.abs() <= 64, (64, 64)),
        (lambda far: (far >= 0) & (far <= 9), (9, 0)),
        (lambda far: (far >= -1) & (far <= 7), (7, 1)),
    ],
)
def test_windows_are_found_on_both_sides(sees: Any, reach: tuple[int, int]) -> None:
    assert reach_of(_call(sees)) == reach


@pytest.mark.parametrize("sees", [lambda far: far % 2 == 0, lambda far: far.abs() != 3])
def test_a_mask_that_is_no_window_is_refused(sees: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="no window"):
        reach_of(_call(sees))
