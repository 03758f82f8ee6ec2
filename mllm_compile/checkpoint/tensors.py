"""Reads what a model's weight files hold, whatever their format."""

from __future__ import annotations

from mllm_compile.checkpoint.gguf import read_gguf_tensors
from mllm_compile.checkpoint.quantised import CheckpointTensors, read_tensors
from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.runtime.weights.file_names import is_gguf


def read_model_tensors(model: ModelFolder) -> CheckpointTensors:
    """Reads the headers of the model's weight files.

    Raises:
        CheckpointError: as read_tensors and read_gguf_tensors.
    """
    if is_gguf(model.weight_files[0]):
        return read_gguf_tensors(model.path, model.weight_names)
    return read_tensors(model.path, model.weight_names, model.scheme, model.weight_map)
