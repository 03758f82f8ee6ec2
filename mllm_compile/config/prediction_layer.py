"""Says whether a checkpoint holds a layer for multi-token prediction, by the names of its tensors."""

from __future__ import annotations

import re

from mllm_compile.config.model_folder import ModelFolder
from mllm_compile.runtime.weights.file_names import is_gguf

_COUNT_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


def has_prediction_layer(model: ModelFolder) -> bool:
    """True if a tensor is of such a layer: `mtp.…`, or numbered behind the model's own where config.json names some.

    Raises:
        CheckpointError: a file is damaged.
    """
    from mllm_compile.runtime.weights.header import read_header

    if any(is_gguf(file) for file in model.weight_files):
        return False
    count, named = model.text_config_value("num_hidden_layers"), model.text_config_value(*_COUNT_KEYS)
    behind = rf"(^|\.)layers\.{count}\." if isinstance(count, int) and named else r"(?!)"
    is_of_it = re.compile(rf"^mtp\.|{behind}")
    names = model.weight_map or (name for file in model.weight_files for name in read_header(file).tensors)
    return any(is_of_it.search(name) for name in names)
