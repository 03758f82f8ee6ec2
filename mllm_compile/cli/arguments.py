"""Arguments that several commands share, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mllm_compile.config import EngineConfig

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG.yaml", help="The YAML file; see configs/ for examples.")
]
EngineArgument = Annotated[
    Path,
    typer.Argument(metavar="CONFIG.yaml|RUNTIME", help="The YAML file, or the folder of a compiled runtime."),
]


def engine_argument(path: Path) -> EngineConfig | Path:
    """What an Engine is made from; a mistake in a YAML is reported before anything heavy is imported."""
    return path if path.is_dir() else EngineConfig.from_yaml(path)
