"""`mllm-compile CONFIG.yaml`: compile, or find what was compiled before."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mllm_compile.cli.arguments import ConfigArgument
from mllm_compile.cli.output_paths import check_output_folder
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.config.schema import EngineConfig
from mllm_compile.process.bytecode import OF_TORCH, compiled_ahead
from mllm_compile.process.console import print_table
from mllm_compile.process.no_gc import uncollected
from mllm_compile.process.progress import reporter_for


def compile_command(
    config: ConfigArgument,
    output: Annotated[
        Path | None, typer.Option(help="The runtime's folder; by default its place in the cache (cache.dir).")
    ] = None,
    pack_weights: Annotated[
        bool, typer.Option("--pack-weights", help="Put the weights into the runtime, in the layout they are served in.")
    ] = False,
    verify_weights: Annotated[
        bool,
        typer.Option("--verify-weights", help="Hash the weights' data: remember it, or compare it with what it was."),
    ] = False,
) -> None:
    """Compile the model of a config into a cached runtime (the default command)."""
    engine_config = EngineConfig.from_yaml(config)
    if output is not None:
        check_output_folder("--output", output)

    with compiled_ahead(OF_TORCH):
        with uncollected():
            from mllm_compile.compiler.load_or_compile import load_or_compile

        options = CompileOptions(output, pack_weights, verify_weights)
        runtime = load_or_compile(engine_config, reporter_for(plain_lines=True), options)
    if runtime.was_cached:
        print(f"already compiled: {runtime.folder}")
        if not runtime.serves_same:
            print("opened by itself it serves as it was compiled, with another config or checkpoint: see --output")
        return
    total = sum(seconds for _, seconds in runtime.stages)
    rows = [(name, f"{seconds:.2f}") for name, seconds in runtime.stages]
    print_table(sys.stdout, "compiled", ("stage", "seconds"), [*rows, ("total", f"{total:.2f}")])
    print(f"pieces: {runtime.num_pieces}, distinct: {runtime.num_distinct_pieces}")
    print(f"runtime: {runtime.folder}")
