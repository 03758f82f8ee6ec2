"""Disentangled attention on packed texts: each form of it against Transformers' own forward of each text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DebertaV2Config

from mllm_compile import Engine
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.pooling.build import build_pooling_config
from tests.model.pooling_models import (
    LIMIT,
    RELATIVE,
    by_transformers,
    largest_error,
    pooling_config,
    save_pooling_model,
    served,
    texts_of_ids,
)

slow = pytest.mark.slow
FEW = {"max_relative_positions": 20}  # so that distances of the longest text have no columns of their own


@pytest.mark.parametrize(
    ("class_name", "changes"),
    [
        pytest.param("DebertaV2ForSequenceClassification", {}, id="buckets, one projection for both"),
        pytest.param("DebertaModel", FEW, id="the first form, distances beyond its columns"),
        pytest.param("DebertaModel", {}, marks=slow, id="the first form"),
        pytest.param("DebertaV2Model", {"share_att_key": False, "position_buckets": -1}, marks=slow, id="no buckets"),
        pytest.param("DebertaV2Model", {"pos_att_type": "c2p"}, marks=slow, id="queries alone"),
        pytest.param("DebertaV2ForTokenClassification", {"pos_att_type": "p2c"} | FEW, marks=slow, id="keys alone"),
        pytest.param("DebertaV2Model", {"relative_attention": False}, marks=slow, id="no distances"),
    ],
)
def test_each_form_answers_packed_texts_as_each_alone(class_name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = save_pooling_model(class_name, tmp_path / "model", **changes)
    texts = texts_of_ids()
    with Engine(pooling_config(tmp_path / "model", tmp_path / "cache")) as engine:
        assert largest_error(served(engine, texts), by_transformers(model, texts)) < LIMIT


def test_heads_that_mix_their_scores_are_refused_by_name(tmp_path: Path) -> None:
    save_pooling_model("DebertaModel", tmp_path / "model", talking_head=True)
    with pytest.raises(UnsupportedModelError, match=r"'deberta' models would not be served right: .*talking_head"):
        Engine(pooling_config(tmp_path / "model", tmp_path / "cache"))


def test_a_convolution_over_neighbours_is_refused_by_name(tmp_path: Path) -> None:
    save_pooling_model("DebertaV2Model", tmp_path / "model", conv_kernel_size=3, conv_act="gelu")
    with pytest.raises(UnsupportedModelError, match=r"a convolution mixes neighbouring tokens \(encoder\.conv"):
        Engine(pooling_config(tmp_path / "model", tmp_path / "cache"))


def test_columns_are_those_that_the_model_gives_each_pair_of_tokens() -> None:
    config = DebertaV2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=96,
        architectures=["DebertaV2Model"],
        **RELATIVE | {"position_buckets": 16},
    )
    built = build_pooling_config(config, torch.float32, "embed")
    columns = built.constants["encoder.distance_columns"]
    pairs = built.model.encoder.get_rel_pos(torch.zeros(1, 96, 1))[0]
    rows = torch.arange(96)
    assert columns.shape == (2 * 96 + 1,)
    assert torch.equal(columns[rows[None, :] - rows[:, None] + 96], (pairs + 16).clamp(0, 31))
