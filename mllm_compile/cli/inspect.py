"""`mllm-compile inspect CONFIG.yaml`: what the passes do to the graph."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mllm_compile.cli.arguments import ConfigArgument
from mllm_compile.config import EngineConfig
from mllm_compile.console import print_table
from mllm_compile.progress import reporter_for


def inspect_command(
    config: ConfigArgument,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the graphs; by default inspect/ and the config's name, in the current folder."),
    ] = None,
) -> None:
    """Write the graph before and after every pass, and the program with its pieces, as text."""
    engine_config = EngineConfig.from_yaml(config)
    folder = out if out is not None else Path("inspect") / config.stem

    from mllm_compile.compile import inspect_model

    reports = inspect_model(engine_config, folder, reporter_for(plain_lines=True))
    rows = [
        (report.name, str(report.matches), str(report.nodes_before), str(report.nodes_after), f"{report.ms:.1f}")
        for report in reports
    ]
    print_table(sys.stdout, "passes", ("pass", "matches", "nodes before", "nodes after", "ms"), rows)
    print(f"graphs: {folder.absolute()}")
