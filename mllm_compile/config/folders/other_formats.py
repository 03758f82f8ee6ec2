"""Says what a file or folder of weights is whose format is not read, and which way leads on from there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_GGUF = b"GGUF"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FROM_GGUF = "Give one of its files as model.path: OWNER/REPOSITORY:Q4_K_M, or a downloaded NAME.gguf."


def told_of_file(path: Path) -> str | None:
    """Says what a file with weights is, and what to give instead; None: it holds none as far as is known.

    A pipe is not looked into: what is read of it is gone.
    """
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError:
        return None
    if start.startswith(_GGUF):
        return f"is a GGUF file. Give it a name that ends in .gguf ({path.name}.gguf)."
    if path.suffix == ".safetensors":
        return (
            "is a weight file in safetensors. Give the folder that holds it, with config.json and the tokenizer "
            f"({os.path.dirname(path) or '.'})."
        )
    if path.suffix in _PICKLES:
        return (
            "is a weight file of PyTorch, which is not read, as pickles can run code. Give a folder with safetensors, "
            "which Transformers writes: from_pretrained(…).save_pretrained(FOLDER)."
        )
    return None


def told_of_folder(folder: Path) -> str | None:
    """Says which other weights a folder without safetensors holds, and the way from these; None: no known ones."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if names:
        return (
            f"holds weights as {names[0]}, which is not read (pickles can run code). Convert them with Transformers: "
            "from_pretrained(…).save_pretrained(FOLDER)."
        )
    if "gguf" in str(folder).lower():
        return f"is of a repository of GGUF files by its name. {_FROM_GGUF}"
    return None


def mlx_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section that MLX has written of the quantised weights of a folder of its own; None: it has not.

    It writes bits and groups without a method, under one name or two.
    """
    for name in ("quantization", "quantization_config"):
        section = config.get(name)
        if isinstance(section, dict) and "quant_method" not in section and {"group_size", "bits"} <= section.keys():
            return section
    return None
