"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG.yaml", help="The YAML file; see configs/ for examples.")
]
