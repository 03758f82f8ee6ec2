"""`mllm-compile MODEL`: compile, or find what was compiled before."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mllm_compile.cli.arguments import ModelArgument, QuietOption, SpeculativeOption, VerboseOption, reporter_of
from mllm_compile.cli.output_paths import check_output_folder
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.config.sources import config_or_runtime, with_speculative
from mllm_compile.errors import ConfigError
from mllm_compile.process.bytecode import OF_TORCH, compiled_ahead
from mllm_compile.process.console import print_table
from mllm_compile.process.no_gc import gc_paused


def compile_command(
    model: ModelArgument,
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
    speculative_config: SpeculativeOption = None,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compile a model into a cached runtime (the default command)."""
    source, reporter = with_speculative(config_or_runtime(model), speculative_config), reporter_of(verbose, quiet)
    options = CompileOptions(output, pack_weights, verify_weights)
    if isinstance(source, Path) and options != CompileOptions():
        raise ConfigError(
            f"{source} is a compiled runtime; --output, --pack-weights and --verify-weights take the model or config "
            "that it was compiled from"
        )
    if output is not None:
        check_output_folder("--output", output)

    with compiled_ahead(OF_TORCH):
        with gc_paused():
            from mllm_compile.compiler.load_or_compile import load_or_compile, open_runtime

        if isinstance(source, Path):
            runtime = open_runtime(source, reporter)
        else:
            runtime = load_or_compile(source, reporter, options)
    if runtime.was_cached:
        print(f"already compiled: {runtime.folder}")
        if not runtime.serves_same:
            print("opened by itself it serves as it was compiled, with another config or checkpoint: see --output")
        return
    total = sum(seconds for _, seconds in runtime.stages)
    if verbose:
        rows = [(name, f"{seconds:.2f}") for name, seconds in runtime.stages]
        print_table(sys.stdout, "compiled", ("stage", "seconds"), [*rows, ("total", f"{total:.2f}")])
    print(f"compiled in {total:.1f} s: {runtime.num_pieces} pieces, {runtime.num_distinct_pieces} of them distinct")
    print(f"runtime: {runtime.folder}")
