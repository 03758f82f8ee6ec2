"""passes/rotate_heads.py on traced models that pool; the kernel is a stand-in in plain torch (stand_ins.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mllm_compile import Engine
from mllm_compile.passes.match import nodes
from mllm_compile.passes.rotate_heads import RotateHeads
from tests.model.pooling_models import (
    LIMIT,
    by_transformers,
    largest_error,
    pooling_config,
    save_pooling_model,
    served,
    texts_of_ids,
)
from tests.passes.support.stand_ins import ROPE_AND_CACHE, only_kernel_passes, stand_in_ops


# Heads are normed and rotated, by 1 + their weight; rotated alone; or neither.
@pytest.mark.parametrize(
    ("name", "is_changed"),
    [("Qwen3Model", True), ("Gemma3TextModel", True), ("LlamaModel", True), ("BertModel", False)],
)
def test_heads_of_texts_are_made_by_one_kernel_and_answers_stay(name, is_changed, monkeypatch, tmp_path):
    monkeypatch.setattr(nodes, "KERNEL_DTYPES", (torch.float32,))
    only_kernel_passes(monkeypatch, RotateHeads)
    matches: list[int] = []
    plain = RotateHeads.__call__

    def counted(self: RotateHeads, gm: Any) -> Any:
        result = plain(self, gm)
        matches.append(result.matches)
        return result

    monkeypatch.setattr(RotateHeads, "__call__", counted)
    model = save_pooling_model(name, tmp_path / "model")
    texts = texts_of_ids()
    config = pooling_config(tmp_path / "model", tmp_path / "cache", task="embed")
    with stand_in_ops(ROPE_AND_CACHE), Engine(config) as engine:
        answers = served(engine, texts)
    assert matches == [model.config.num_hidden_layers if is_changed else 0]
    assert largest_error(answers, by_transformers(model, texts)) < LIMIT
