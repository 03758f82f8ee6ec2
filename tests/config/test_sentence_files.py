"""sentence-transformers' files: what they say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mllm_compile.config.folders.sentence_files import read_sentence_files
from mllm_compile.errors import CheckpointError, MllmError, UnsupportedModelError
from tests.pooling_folder import save_module_files

MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def test_a_folder_without_them_has_none(tmp_path: Path) -> None:
    assert read_sentence_files(tmp_path) is None


def test_they_say_pooling_prompts_and_length(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "q: "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    save_module_files(tmp_path, "Transformer", "Pooling", "Normalize", pooling=MEAN, settings=settings)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256, "do_lower_case": True}))
    found = read_sentence_files(tmp_path)
    assert found is not None and found.rules == ("mean",) and found.normalize and found.lower_case
    assert (found.max_length, found.default_prompt, found.similarity) == (256, "query", "dot")


@pytest.mark.parametrize(
    ("kinds", "pooling", "settings", "error", "message"),
    [
        (("Transformer", "Pooling", "LSTM"), MEAN, {}, UnsupportedModelError, "type 'LSTM'"),
        (("Pooling", "Transformer"), MEAN, {}, UnsupportedModelError, "has modules Pooling, Transformer"),
        (("Transformer", "Pooling"), {"pooling_mode_weightedmean_tokens": True}, {}, UnsupportedModelError, "weighted"),
        (("Transformer", "Pooling"), {}, {}, UnsupportedModelError, "no mode"),
        (("Transformer", "Pooling"), MEAN, {"prompts": ["q"]}, CheckpointError, "texts by name"),
        (("Transformer", "Pooling"), MEAN, {"default_prompt_name": "q"}, CheckpointError, "names no prompt"),
        (("Transformer", "Pooling"), MEAN, {"similarity_fn_name": "jaccard"}, UnsupportedModelError, "jaccard"),
        (("Transformer", "Pooling", "Dense"), MEAN, {}, CheckpointError, "holds no model.safetensors"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    kinds: tuple[str, ...],
    pooling: dict[str, Any],
    settings: dict[str, Any],
    error: type[MllmError],
    message: str,
    tmp_path: Path,
) -> None:
    save_module_files(tmp_path, *kinds, pooling=pooling, settings=settings)
    with pytest.raises(error, match=message):
        read_sentence_files(tmp_path)


def test_a_module_of_another_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "Transformer", "path": "../x"}]))
    with pytest.raises(CheckpointError, match="one of the same folder"):
        read_sentence_files(tmp_path)
