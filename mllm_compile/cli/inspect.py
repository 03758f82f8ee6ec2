"""`mllm-compile inspect MODEL`: what the passes do to the graph, as text or as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mllm_compile.cli.arguments import ModelArgument, QuietOption, VerboseOption, reporter_of
from mllm_compile.cli.output_paths import check_output_file, check_output_folder
from mllm_compile.config.names import source_name
from mllm_compile.config.sources import config_or_runtime
from mllm_compile.errors import ConfigError
from mllm_compile.process.console import print_table

if TYPE_CHECKING:
    from mllm_compile.config.schema import EngineConfig
    from mllm_compile.process.progress import Reporter


def inspect_command(
    model: ModelArgument,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the graphs; by default inspect/ and the model's name, in the current folder."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one page about the compiled runtime (compiling it first if need be).")
    ] = None,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write the graph before and after every pass, and the program with its pieces, as text; or all as one page."""
    source, reporter = config_or_runtime(model), reporter_of(verbose, quiet)
    if html is not None and out is not None:
        raise ConfigError("--html writes one page, --out a folder of graphs; give one of them")
    if html is not None:
        _write_page(source, html, reporter)
    elif isinstance(source, Path):
        raise ConfigError(f"{source} is a runtime: its graphs are in {source / 'graphs'}. Add --html FILE for a page.")
    else:
        _write_graphs(source, out if out is not None else Path("inspect") / source_name(model), reporter)


def _write_graphs(config: EngineConfig, folder: Path, reporter: Reporter) -> None:
    check_output_folder("--out", folder)

    from mllm_compile.report.inspect import inspect_model

    inspected = inspect_model(config, folder, reporter)
    rows = [
        (report.name, str(report.matches), str(report.nodes_before), str(report.nodes_after), f"{report.ms:.1f}")
        for report in inspected.reports
    ]
    print_table(sys.stdout, "passes", ("pass", "matches", "nodes before", "nodes after", "ms"), rows)
    for name, reason in inspected.left_out.items():
        print(f"left out: {name}: {reason}")
    for line in inspected.cut:
        print(line)
    pieces = [(piece.where, str(piece.count), piece.holds) for piece in inspected.pieces]
    print_table(sys.stdout, "pieces", ("where", "calls", "holds"), pieces)
    print(f"graphs: {folder.absolute()}")


def _write_page(source: EngineConfig | Path, path: Path, reporter: Reporter) -> None:
    check_output_file("--html", path)

    from mllm_compile.compiler.load_or_compile import load_or_compile
    from mllm_compile.report.page import write_page
    from mllm_compile.report.speed import ensure_ceilings
    from mllm_compile.store.artifact import open_artifact

    if isinstance(source, Path):
        artifact = open_artifact(source)
        config = artifact.manifest.resolved_config(source)
    else:
        runtime = load_or_compile(source, reporter)
        artifact, config = runtime.artifact, runtime.config
    ensure_ceilings(artifact, config)
    write_page(artifact, config, path)
    print(f"page: {path.absolute()}")
