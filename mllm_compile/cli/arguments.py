"""Arguments that several commands share, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG.yaml", help="The YAML file; see configs/ for examples.")
]
EngineArgument = Annotated[
    Path,
    typer.Argument(metavar="CONFIG.yaml|RUNTIME", help="The YAML file, or the folder of a compiled runtime."),
]
