"""Writes tensors to a file; what the system refuses is an OSError, as with every other file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """
    Raises:
        OSError: the file cannot be written, or the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
