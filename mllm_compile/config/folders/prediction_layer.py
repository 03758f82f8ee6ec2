"""Counts a checkpoint's layers for multi-token prediction, by the names of its tensors."""

from __future__ import annotations

import re
from itertools import count

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.runtime.weights.file_names import is_gguf

_COUNT_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


def num_prediction_layers(model: ModelFolder) -> int:
    """Such layers that follow each other: `mtp.layers.0.…` or any `mtp.…`, or those numbered behind the model's own, as
    many as config.json names.

    Raises:
        CheckpointError: a file is damaged.
    """
    from mllm_compile.runtime.weights.header import read_header

    if any(is_gguf(file) for file in model.weight_files):
        return 0
    first, named = model.text_config_value("num_hidden_layers"), model.text_config_value(*_COUNT_KEYS)
    names = model.weight_map or [name for file in model.weight_files for name in read_header(file).tensors]
    found: set[int] = set()
    for name in names:
        number = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if name.startswith("mtp."):
            found.add(0 if number is None else int(number[1]))
        elif number is not None and isinstance(first, int) and isinstance(named, int):
            found |= {int(number[1]) - first} & {*range(named)}
    return next(number for number in count() if number not in found)
