"""Refusals of runtimes that gradients cannot follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec
from mllm_compile.train.refusals import check_artifact


def artifact(part: WeightPart | None = None, is_packed: bool = False, **program: Any) -> Any:
    spec = WeightSpec("w", (2, 2), torch.float32, (part or WeightPart("w", "f", 0, (2, 2)),))
    plain = {"layers": (), "media": None, "inputs": (), "rope": None}
    return SimpleNamespace(
        weights=(spec,),
        manifest=SimpleNamespace(weights=SimpleNamespace(is_packed=is_packed)),
        program=SimpleNamespace(**plain | program),
    )


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (artifact(WeightPart("w", "f", 0, (2, 2), kept=object())), "the checkpoint's weights are quantised"),
        (artifact(is_packed=True), "holds its weights packed"),
        (artifact(layers=(SimpleNamespace(top_k=8),)), "an indexer chooses the keys"),
        (artifact(media=object()), "takes images; expected a model of text alone"),
        (artifact(rope=object()), "positions follow more than the place of a token"),
        (artifact(inputs=("hidden_states",)), "positions follow more"),
    ],
)
def test_a_runtime_that_gradients_cannot_follow_is_refused(refused: Any, said: str) -> None:
    check_artifact(artifact())
    with pytest.raises(UnsupportedModelError, match=said):
        check_artifact(refused)
